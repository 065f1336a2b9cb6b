"""Finds the best compiler options and implementations for a layout, by compiling it with each."""
