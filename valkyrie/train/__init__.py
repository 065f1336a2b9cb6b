"""Trains a model: the train state, the compiled training step, and the training loop."""
