"""The data sources that ship with Valkyrie: one module each, with a `Config` (`valkyrie/data/README.md`)."""
