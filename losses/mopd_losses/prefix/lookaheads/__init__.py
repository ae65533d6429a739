"""Comparisons after tokens that the teacher is sure of and a completion does not continue with."""
