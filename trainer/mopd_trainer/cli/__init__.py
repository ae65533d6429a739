"""The commands of ``mopd``."""
