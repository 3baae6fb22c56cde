"""Hypothesis profile: 200 examples per test, or THRESHER_FUZZ_EXAMPLES."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("THRESHER_FUZZ_EXAMPLES", "200")),
    deadline=None,
    derandomize="THRESHER_FUZZ_EXAMPLES" not in os.environ,  # the same cases in every test run
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fuzz")
