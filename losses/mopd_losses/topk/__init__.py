"""Losses on top-k distributions."""
