"""HTTP: problem documents, request bodies, lifecycle, logs, metrics."""
