"""Configuration: what a command line asks for, composed by Hydra, typed and checked. Imports no JAX."""
