"""Teacher services that a client can call."""
