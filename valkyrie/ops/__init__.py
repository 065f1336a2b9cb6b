"""Decides how the heavy array operations of the models are computed; every choice of implementation agrees in value."""
