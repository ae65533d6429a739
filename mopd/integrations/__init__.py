"""Teacher services for the trainers of other projects: ``trl`` and ``verl``."""
