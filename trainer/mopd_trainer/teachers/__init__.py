"""Connecting to teachers and scoring rollouts."""
