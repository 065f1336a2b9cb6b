"""The estimate: closed formulas for the step time and memory of many layouts at once, without a compiler or JAX."""
