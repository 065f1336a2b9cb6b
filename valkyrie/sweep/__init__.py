"""Carries out multiruns: enumerates layouts, runs each trial in a separate process, and records its result."""
