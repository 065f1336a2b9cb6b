"""Sweeps (Hydra's multiruns): enumerates layouts, runs each in a separate process, and records the results."""
