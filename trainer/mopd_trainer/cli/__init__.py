"""Command line of ``mopd``."""
