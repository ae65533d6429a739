"""Names of the files in a run folder that other packages and programs read."""

#: Metrics, one line of JSON per step.
JOURNAL = "journal.jsonl"
#: Logged completions, one line of JSON each: see ``logged_completion``.
COMPLETIONS = "completions.jsonl"
