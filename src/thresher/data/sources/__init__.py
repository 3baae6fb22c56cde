"""Source files: resolve names to files, and read their rows in spans."""
