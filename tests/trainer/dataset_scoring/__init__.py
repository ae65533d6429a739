"""Tests of ``mopd score``."""
