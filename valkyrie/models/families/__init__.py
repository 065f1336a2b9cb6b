"""The model families of this package: every module here is one, by its name, and has a `Config`."""
