"""HTTP: connections, attempts, retries, replicas."""
