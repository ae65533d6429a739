"""Divergences between distributions, full and truncated."""
