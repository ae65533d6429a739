"""HTTP: problem documents, request bodies, logs, metrics."""
