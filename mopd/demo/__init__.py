"""``mopd demo``: two tasks, three tokenizers, two teachers and a student."""
