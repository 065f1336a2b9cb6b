"""Valkyrie: choose the mesh and partition before you rent the slice, then train on it."""

__version__ = "0.1.0"
