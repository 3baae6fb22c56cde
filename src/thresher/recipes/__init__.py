"""Recipes: configs with published settings, one YAML file each, and the catalog that reads them."""
