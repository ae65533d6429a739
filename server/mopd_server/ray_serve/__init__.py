"""Teachers on a Ray cluster: replicas by Ray Serve around the service's own application."""
