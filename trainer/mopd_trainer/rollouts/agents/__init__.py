"""Trajectories of several turns, sampled by the user's agent."""
