"""Calls teachers over HTTP: one teacher or a pool, with retries and checks of the answers."""
