"""Launch engines: start a training on this machine, on other hosts, or on rented hardware."""
