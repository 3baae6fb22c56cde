"""Optimizers of the native engine: which there are, parameter groups, and states in blocks of 8 bits."""
