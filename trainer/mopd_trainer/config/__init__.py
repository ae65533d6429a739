"""Settings of a run: types, loading, fingerprint."""
