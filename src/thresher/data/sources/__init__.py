"""Source files: resolving names, reading rows in spans."""
