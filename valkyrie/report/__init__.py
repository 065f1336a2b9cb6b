"""The report of sweeps: `trials.jsonl` and run folders, ranked, explained and drawn. Imports no JAX."""
