"""Files of a run: journal, checkpoints, recorded scores, lock."""
