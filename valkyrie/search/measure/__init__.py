"""Measures the step of a run, or the speed of the devices, on this machine."""
