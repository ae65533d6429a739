"""Recorded steps: completions and scores on disk, and training on them."""
