"""Fits the constants of the estimate and of the replay to measured trials."""
