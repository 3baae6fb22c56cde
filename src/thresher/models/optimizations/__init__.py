"""Exact replacements that make a model's forward and backward cheaper."""
