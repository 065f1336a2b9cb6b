"""The optimizers that ship with Valkyrie, one module each."""
