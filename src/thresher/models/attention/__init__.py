"""Attention over packed pairs: which rows see which, on every device, behind transformers' attention interface."""
