"""The modes of `valkyrie-train`. Each module has a `Config`, and a YAML in `conf/mode`. These modules import no JAX."""
