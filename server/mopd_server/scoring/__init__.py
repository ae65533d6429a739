"""Scoring of requests: tokenization, queue, batching, self-check."""
