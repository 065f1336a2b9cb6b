"""The expensive array operations of models: attention, recurrences, matrix products and losses."""
