"""Inference engines: token ids in, next-token distributions out."""
