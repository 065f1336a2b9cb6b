"""Estimates the step time and memory of many layouts at once by closed formulas, without a compiler or JAX."""
