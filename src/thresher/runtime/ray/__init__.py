"""The Ray runtime: placement, worker clusters, heartbeats, elastic scaling and jobs."""
