"""HTTP transport: connection pools, retries, circuit breakers, choice of replica."""
