"""Trackers: the destinations of metrics."""
