"""Explains why one layout is faster than another."""
