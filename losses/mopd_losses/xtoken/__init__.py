"""X-Token's losses, for comparison (experimental)."""
