"""Finds fast layouts before training: estimates, compiles or measures the step of each."""

NOT_COMPILED = 3
"""Exit status if a layout does not fit or was not compiled. This is a result, not an error."""
