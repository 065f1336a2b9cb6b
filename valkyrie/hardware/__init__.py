"""Hardware: chips, slices, and the targets that name them."""
