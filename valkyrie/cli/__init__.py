"""The commands: each module holds one `main`, and imports what is heavy only once the arguments are checked."""
