"""Decides how trials are shown: one static page, tables, and dashboards of W&B. Imports no JAX."""
