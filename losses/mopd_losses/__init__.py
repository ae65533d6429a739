"""Alignment of two tokenizations, projection between two vocabularies, and the losses on them."""
