"""A config made in Python, where the names are TRL's too: what they mean together, and options of the trainer alone."""

from __future__ import annotations

import warnings
from typing import Any

# names of TRL that a run does not use, with their defaults: what save_model and push_to_hub of DPOTrainer do
TRAINER_OPTIONS: dict[str, Any] = {
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "hub_model_id": None,
    "hub_token": None,
    "hub_private_repo": None,
    "hub_revision": None,
}
# TRL's default of logging_steps, the steps between evaluations of a program that sets neither
_TRL_LOGGING_STEPS = 10


def as_in_trl(given: dict[str, Any]) -> dict[str, Any]:
    """Read settings that depend on each other as TRL does."""
    steps = given.get("max_steps")
    if isinstance(steps, int) and steps > 0 and given.get("num_train_epochs") is not None:
        warnings.warn(
            "num_train_epochs has no effect with max_steps, as in TRL: the data repeats for max_steps steps; "
            "remove one of them",
            stacklevel=3,
        )
        given = {name: value for name, value in given.items() if name != "num_train_epochs"}
    if given.get("eval_strategy") == "steps" and given.get("eval_steps") is None:
        given = {**given, "eval_steps": given.get("logging_steps", _TRL_LOGGING_STEPS)}
    return given
