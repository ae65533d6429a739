"""What teacher and student agree on: nouns, token bytes, manifest, wire format and errors."""
