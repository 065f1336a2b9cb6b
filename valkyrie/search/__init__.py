"""Looks at layouts before anyone runs them: compiles them for the real chips and replays the schedule."""
