"""Logs, metrics and heartbeats of a run. `thresher.redact` masks secrets in them."""
