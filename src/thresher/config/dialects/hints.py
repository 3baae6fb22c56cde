"""Hints for keys of other trainers in a config of ours."""

from __future__ import annotations

from thresher.config.dialects.read import NAMES

_ORDER = ("trl", "llama-factory", "axolotl", "ms-swift", "open-instruct", "colossalchat", "roll")
# spellings that people use and no trainer above has
_COMMON = {
    **dict.fromkeys(("model_path", "model_id"), "pretrain"),
    **dict.fromkeys(("epochs",), "num_train_epochs"),
    **dict.fromkeys(("max_len",), "sequence_length"),
    **dict.fromkeys(("max_lr",), "actor_train.training_args.learning_rate"),
    "use_gradient_checkpointing": "actor_train.training_args.gradient_checkpointing",
    "ref_model_name_or_path": "reference.model_args.model_name_or_path",
    "eval_file": "validation.data_args.file_name",
    "preference_loss": "pref_loss",
    "wandb": "track_with",
}


# arguments of other trainers' Python classes, which no config of theirs has
_REASONS = {
    "start_epoch": "a run resumes from its newest checkpoint by itself; see `resume_from_checkpoint`",
    "use_ref_model": "set `reference.mode`: none trains without a reference",
}


def hint(path: str) -> str | None:
    """Say what a key of another trainer is called here, or why there is none; None for a key that nobody has."""
    spellings = (path, path.rpartition(".")[2])  # ROLL has sections, the other trainers have flat keys
    tables = [(NAMES[name].title, NAMES[name].table) for name in _ORDER]
    found = [(title, table[key]) for key in spellings for title, table in tables if key in table]
    if spellings[-1] in _REASONS:
        return _REASONS[spellings[-1]]
    target = next((rule.targets[0] for _, rule in found if rule.targets), _COMMON.get(spellings[-1]))
    if target is not None:
        return f"did you mean `{target}`?"
    return f"a key of {found[0][0]} without an equivalent: {found[0][1].note}" if found else None


def names_of_other_trainers() -> dict[str, str]:
    """Map the flat keys of other trainers to our keys, for suggestions by spelling."""
    names = dict(_COMMON)
    for name in reversed(_ORDER):
        names |= {key: rule.targets[0] for key, rule in NAMES[name].table.items() if rule.targets and "." not in key}
    return names


def flat_names(name: str = "trl") -> dict[str, str]:
    """Map the flat names of a trainer to our dotted keys, for values that mean the same in both."""
    return {
        key: rule.targets[0]
        for key, rule in NAMES[name].table.items()
        if rule.targets and rule.function is None and not rule.differs
    }
