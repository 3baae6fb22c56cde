"""The Ray runtime: clusters of workers, placement, recovery, jobs."""
