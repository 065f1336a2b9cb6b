"""Carries out multiruns: enumerates layouts, runs each trial in a process of its own, and records what it came to."""
