"""X-Token's published losses, faults included: experimental, for comparison only."""
