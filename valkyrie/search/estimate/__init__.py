"""Estimates the step time and memory of many layouts at once in closed form, without a compiler or JAX."""
