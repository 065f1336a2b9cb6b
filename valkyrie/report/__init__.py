"""Reports of sweeps: ranks, explains and draws `trials.jsonl` and run folders. Does not import JAX."""
