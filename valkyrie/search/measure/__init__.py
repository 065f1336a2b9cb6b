"""Times the real step, and the speed of the devices, on this machine."""
