"""Times the real step, and what the devices reach, on the devices of this machine."""
