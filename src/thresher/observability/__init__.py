"""What a run tells the world: trackers, rates and memory; `thresher.redact` keeps secrets out of it."""
