"""The expensive array operations of the models. Implementations of an operation agree up to rounding."""
