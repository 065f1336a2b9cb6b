"""Looks at layouts before anyone trains on them: compiles them for the real chips, replays the schedule, measures."""

NOT_COMPILED = 3
"""Exit status where a layout does not fit or was not compiled: a result, not an error; the report says why."""
