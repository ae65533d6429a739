"""Prefix KL."""
