"""Evaluates layouts before anyone trains on them: compiles them for the real chips, replays the schedule, measures."""

NOT_COMPILED = 3
"""Exit status if a layout does not fit or was not compiled: a result, not an error. The report gives the reason."""
