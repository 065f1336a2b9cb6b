"""The optimizers that ship with Valkyrie, a module each."""
