"""Scoring requests: tokenization, batching, engine loading."""
