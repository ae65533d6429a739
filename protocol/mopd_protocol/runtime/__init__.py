"""Process and device helpers shared by server and trainer."""
