"""The vLLM rollout engine. The only folder of the trainer that imports vLLM."""
