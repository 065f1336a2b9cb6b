"""Processes of a run: how they start, meet, lock what they write, and end."""
