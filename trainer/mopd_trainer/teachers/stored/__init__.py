"""Stored scores in place of a teacher: ``mopd score`` writes them, training reads them."""
