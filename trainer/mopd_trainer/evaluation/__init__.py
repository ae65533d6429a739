"""Evaluation on held-out prompts: sets, graders, statistics, the student and its teachers."""
