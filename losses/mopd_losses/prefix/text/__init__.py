"""The text of completions in tokens: boundaries, the open rows at them, and slices of text."""
