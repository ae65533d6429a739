"""Losses on aligned spans."""
