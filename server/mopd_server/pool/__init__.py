"""Several teachers that share the memory of one device."""
