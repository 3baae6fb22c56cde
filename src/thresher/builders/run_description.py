"""`run.json` beside the metrics: what a run was, for `thresher report`. Rewritten by each attempt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from thresher import durable
from thresher.builders.inputs import RunInputs
from thresher.builders.run import logging_dir
from thresher.config import DPOConfig
from thresher.data.prepare.report import report_of
from thresher.data.store.reader import PairStore
from thresher.errors import UserError
from thresher.observability.log_files import DESCRIPTION
from thresher.observability.machine import environment
from thresher.observability.trackers.tracker import translate_os_errors
from thresher.redact import redact


def describe_run(config: DPOConfig, inputs: RunInputs, facts: Mapping[str, str]) -> None:
    """Write name, facts, config, data reports and environment, with secrets masked."""
    plan, is_held_out = inputs.plan, config.validation is not None and config.validation.split is not None
    description = {
        "exp_name": config.exp_name,
        "num_steps": plan.num_steps,
        "pairs_per_step": plan.pairs_per_step,
        "facts": facts,
        "config": config.model_dump(mode="json"),
        # validation pairs that were held out are counted in the report of the training file
        "data": {
            "train": _describe_store(inputs.train, has_report=True),
            "validation": _describe_store(inputs.validation, has_report=not is_held_out),
        },
        "environment": environment(),
    }
    text = json.dumps(redact(description), ensure_ascii=False, indent=1)
    with translate_os_errors():
        durable.replace(logging_dir(config) / DESCRIPTION, text.encode("utf-8", errors="replace"))


def _describe_store(store: PairStore | None, *, has_report: bool) -> dict[str, Any] | None:
    if store is None:
        return None
    try:
        report = report_of(store).to_json() if has_report else None
    except UserError:  # the run has warned about it
        report = None
    return {"pairs": len(store), "report": report}
