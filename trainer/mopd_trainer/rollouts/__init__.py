"""Sampling completions from the student."""
