"""Console output and the HTML report of a run."""
