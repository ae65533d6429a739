"""Starting the processes of a run: ranks, and a Ray cluster."""
