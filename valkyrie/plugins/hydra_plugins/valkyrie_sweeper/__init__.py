"""Hydra finds `hydra/sweeper=` here. Thin on purpose: every Hydra program of an environment imports it."""
