"""Alignment of two tokenizations of one text."""
