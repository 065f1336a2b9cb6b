"""The expensive array operations of the models. All implementations of an operation give equal values."""
