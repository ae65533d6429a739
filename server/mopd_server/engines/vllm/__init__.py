"""The vLLM engine. The only folder of the server that imports vLLM."""
