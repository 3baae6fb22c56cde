"""The Python API: a trainer that takes Python objects, as a facade over the config and the pipeline."""

from thresher import importers

importers.install()  # programs use TRL's names
