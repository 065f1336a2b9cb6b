"""Meshes, partitions and layouts, which determine how arrays are sharded. Independent of any model."""
