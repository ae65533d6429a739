"""The teacher's tokenizer and chat template on the client's side."""
