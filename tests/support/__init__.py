"""Helpers that the tests share: small models, runs and stores, programs that tests start, and oracles."""
