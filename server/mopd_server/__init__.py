"""The teacher's HTTP service: reads completions and answers with the teacher's distributions."""
