"""Prepare source files into a store: blocks, statistics, findings, report."""
