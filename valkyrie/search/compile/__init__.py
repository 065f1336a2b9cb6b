"""Compiles a layout for its target and predicts its step from the compiled module."""
