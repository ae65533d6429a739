"""ASGI middleware and per-request limits."""
