"""Array operations of models: attention, recurrences, matrix products and losses. `atan2.py` contains optimizers."""
