"""`mode=search`: estimate every layout of a model on a slice, compile the best ones, and say which to train on."""
