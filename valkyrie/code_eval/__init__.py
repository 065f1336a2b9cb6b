"""Evaluation by code: problems, what a model writes for them, compiled and run in a sandbox. Imports no JAX.

Nothing is imported here: `valkyrie.code_eval.config` must load in milliseconds.
"""
