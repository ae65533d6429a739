"""Process groups, sharding and unsharded copies."""
