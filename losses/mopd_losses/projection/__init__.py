"""Projection between two vocabularies."""
