"""Evaluates generated code: problems, the model's completions, and a sandbox to compile and run them. Imports no JAX.

Nothing is imported here: `valkyrie.code_eval.config` must load in milliseconds.
"""
