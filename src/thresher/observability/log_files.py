"""Names of the files in the log directory of a run, for those who write them and for `thresher report`."""

METRICS = "metrics.jsonl"
DESCRIPTION = "run.json"
EVAL_PAIRS = "eval_pairs.jsonl"
SKIPPED_STEPS = "skipped_steps.jsonl"
RECOVERIES = "recoveries.jsonl"
HEALTH = "health.jsonl"
SAMPLES = "samples.jsonl"
