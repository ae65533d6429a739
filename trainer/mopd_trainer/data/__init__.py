"""Prompts, training examples and micro-batches."""
