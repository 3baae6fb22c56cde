"""Random input for every reader, and what must hold for it."""
