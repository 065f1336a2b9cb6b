"""Meshes, partitions and layouts: everything that decides where an array lies. Nothing here knows a model."""
