"""Comparison of two tokenizers: alignment of a text, and the projection of vocabularies."""
