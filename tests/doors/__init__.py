"""Clients of other trainers, installed by ``make doors``, against a live teacher service."""
