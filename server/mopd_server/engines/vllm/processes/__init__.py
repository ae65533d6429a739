"""vLLM's processes: how they wait, whether they respond, and why they exited."""
