"""The report of sweeps: `trials.jsonl` and run folders, ranked, said in words and drawn. Imports no JAX."""
