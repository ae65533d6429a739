"""Prefix KL: a cross-tokenizer divergence on text, at every token boundary of either side."""
