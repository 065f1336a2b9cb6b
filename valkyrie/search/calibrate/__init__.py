"""Fits the constants of step-time estimates and replays to the user's own trials."""
