"""The end of a turn as one event, whatever tokens say it."""
