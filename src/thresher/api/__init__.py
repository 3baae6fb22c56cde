"""The Python API: a trainer that takes Python objects, as a facade over the config and the pipeline."""
