"""The report of sweeps: what is read from `trials.jsonl` and run folders, ranked, said in words, drawn. Imports no JAX."""
