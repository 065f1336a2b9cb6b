"""The heavy array operations of the models; all implementations of one agree in value."""
