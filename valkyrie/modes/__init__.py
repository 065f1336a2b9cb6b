"""The modes of `valkyrie-train`: a module with a `Config` each, and a YAML in `conf/mode`. Imports no JAX."""
