"""A vocabulary in the order of its bytes, and sets of its tokens, as arrays."""
