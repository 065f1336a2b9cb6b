"""Puzzles as data: generated or read, kept in the published folder form, augmented and laid out in batches."""
