"""Builders: objects from the config. The only package below the pipeline and the runtime that reads the config."""
