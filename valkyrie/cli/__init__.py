"""Command-line entry points. Each `main` imports JAX and other heavy modules only after it has parsed its arguments."""
