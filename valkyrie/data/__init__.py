"""Prepares data and loads batches: data sources, tokenizers, token shards on disk, text streams and puzzles.

Nothing is imported here: `valkyrie.data.config` must load in milliseconds, and grain is imported where it is used.
"""
