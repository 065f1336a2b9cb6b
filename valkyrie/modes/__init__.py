"""The modes of `valkyrie-train`. Each is a module with a `Config` and a YAML in `conf/mode`. Imports no JAX."""
