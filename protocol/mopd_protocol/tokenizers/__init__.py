"""Token bytes, tokenizer files and roles."""
