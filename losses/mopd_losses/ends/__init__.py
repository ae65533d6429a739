"""The end of a turn as one event for all tokens that end a completion."""
