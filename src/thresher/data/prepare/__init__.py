"""From source files to a store: blocks, statistics, findings, report."""
