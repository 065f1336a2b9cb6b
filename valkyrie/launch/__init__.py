"""Launching: engines start a training on this machine, on other hosts, or on hardware that is rented for it."""
