"""Run folders: where they are, what is logged to them, and how their wall time was spent."""
