"""Processes of a run: starting child processes, connecting to each other, locking files, and ending."""
