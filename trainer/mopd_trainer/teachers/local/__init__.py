"""Teachers in the trainer's own process."""
