"""A teacher's scores in the ids of a student with another tokenizer.

The only part of the server that imports client and losses; imported on use.
"""
