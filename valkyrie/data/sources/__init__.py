"""The data sources that ship with Valkyrie: one module each, with a `Config` (see `valkyrie/data/README.md`)."""
