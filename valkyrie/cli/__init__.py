"""The commands. Each module has one `main`, which imports heavy modules only after it has checked the arguments."""
