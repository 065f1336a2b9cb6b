"""The model families of this package. Every module is a family of the same name, with a `Config` class."""
