"""Tries compiler options and implementations on one layout, by compiling."""
