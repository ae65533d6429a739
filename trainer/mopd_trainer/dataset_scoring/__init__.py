"""Score a data set once: ``mopd score``."""
