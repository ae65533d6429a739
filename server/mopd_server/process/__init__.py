"""Process and sockets of the service."""
