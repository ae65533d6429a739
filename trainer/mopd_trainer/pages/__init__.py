"""Pages for a browser: a run, and the alignment explorer. Each is one file without a network."""
