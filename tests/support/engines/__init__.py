"""Training steps on several ranks, and the outcomes that they are compared with."""
