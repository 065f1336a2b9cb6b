"""Evaluates layouts before training: estimates them, compiles them for the real chips and replays, or measures."""

NOT_COMPILED = 3
"""Exit status if a layout does not fit or was not compiled. This is a result, not an error."""
