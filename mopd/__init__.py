"""Multi-teacher on-policy distillation: the front door."""
