"""Turns text into token shards on disk, and shards into batches: tokenizer, source, prepare, loader.

Nothing is imported here: `valkyrie.data.config` must load in milliseconds, and grain is imported where it is used.
"""
