"""The student model: loading, adapters, output head, weight files."""
