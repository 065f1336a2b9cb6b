"""Launch engines: start a training run on this machine, on other hosts, or on rented hardware."""
