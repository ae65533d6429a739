"""Checks of a run that cost a minute: ``mopd doctor``; ``mopd check`` runs the cheap ones."""
