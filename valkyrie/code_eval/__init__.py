"""Evaluates generated code: problems, the model's completions, and a sandbox to compile and run them.

Does not import JAX. Nothing is imported here, because `valkyrie.code_eval.config` must load in milliseconds.
"""
