"""Teachers on a Ray cluster."""
