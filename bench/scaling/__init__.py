"""Simulation of a teacher's replicas, and its comparison with replicas on this machine."""
