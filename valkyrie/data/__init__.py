"""Tokenises text into shards on disk and loads batches from them: tokenizer, source, prepare, loader.

Nothing is imported here: `valkyrie.data.config` must load in milliseconds, and grain is imported where it is used.
"""
