"""Tokenizers and chat templates of teachers on the client's side."""
