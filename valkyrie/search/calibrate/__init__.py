"""Fits the constants of the estimate and of the replay to the user's own trials."""
