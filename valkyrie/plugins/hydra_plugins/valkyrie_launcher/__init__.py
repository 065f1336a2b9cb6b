"""Hydra finds `hydra/launcher=` here. Thin on purpose: every Hydra program of an environment imports it."""
