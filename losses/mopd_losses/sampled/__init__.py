"""Losses on sampled tokens."""
