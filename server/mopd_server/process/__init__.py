"""The service's processes and sockets."""
