"""Configuration: composes the command line with Hydra into a typed, checked run. Does not import JAX."""
