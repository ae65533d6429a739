"""The student's side: prompts, rollouts, scores, examples, optimizer steps."""
