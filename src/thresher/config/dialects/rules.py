"""Rules: what becomes of one key of another trainer's config.

A table maps each key of a trainer to a rule. A rule names the key here, or says why there is none, or translates the
value with a small function; `translate` applies a table to a config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thresher.config.dialects.planned import PLANNED

if TYPE_CHECKING:
    from thresher.config.dialects.translation import Translation

Function = Callable[[Any, "Translation"], None]

MODEL = "actor_train.model_args."
TRAINING = "actor_train.training_args."
DATA = "actor_train.data_args."
AXES = "actor_train.strategy_args.strategy_config."
FILES = f"{DATA}file_name"
# names of chat templates in other trainers that are a family here
TEMPLATES = {
    **{name: name for name in ("chatml", "gemma", "llama3", "mistral", "phi4", "qwen2_5", "qwen3")},
    "qwen_25": "qwen2_5",
    "phi_4": "phi4",
    "qwen3_nothink": "chatml",  # LLaMA-Factory: Qwen3's turns without the block of thoughts
}
VALIDATION_FILES = "validation.data_args.file_name"
VALIDATION_SPLIT = "validation.split"


@dataclass(frozen=True)
class Rule:
    """What becomes of one key.

    targets: keys here. note: for people. function: sets the targets; without one, the value is copied to the first
    target. changes_numbers: without a target, whether the setting changes the training, unless its value is neutral.
    """

    targets: tuple[str, ...] = ()
    note: str = ""
    function: Function | None = None
    differs: bool = False
    changes_numbers: bool = False
    neutral: tuple[Any, ...] = ()


def to(target: str, note: str = "", *, differs: bool = False) -> Rule:
    """Copy the value to a key here; `differs` if the key means something else there, which the note explains."""
    return Rule((target,), note, differs=differs)


def by(function: Function, *targets: str, note: str = "") -> Rule:
    """Translate the value with a function."""
    return Rule(targets, note, function)


def part_of(key: str, target: str) -> Rule:
    """The rule of another key reads the value."""
    return Rule((target,), f"read with `{key}`", lambda _, run: run.use(target))


def lacks(note: str, *neutral: Any) -> Rule:
    """Report a setting without an equivalent that changes the training, unless its value is neutral."""
    return Rule(note=note, changes_numbers=True, neutral=neutral)


def planned(name: str, *neutral: Any) -> Rule:
    """Copy the value to a key that `planned.py` names, or report that it does not exist yet."""
    key = PLANNED[name]
    return lacks(key.reason, *neutral) if key.target is None else Rule((key.target,), neutral=neutral)


def adapter() -> Rule:
    """Start from an adapter on disk."""

    def function(value: Any, run: Translation) -> None:
        paths = [path.strip() for path in value.split(",")] if isinstance(value, str) else list(value)
        if len(paths) == 1:
            run.set(f"{MODEL}adapter_name_or_path", paths[0])
            run.note("the reference starts from the adapter too")
        else:
            run.lacks("training starts from one adapter; merge the others into the model first")

    return by(function, f"{MODEL}adapter_name_or_path", note="the reference starts from the adapter too")


def lora_init() -> Rule:
    """Set PEFT's initialization of LoRA."""

    def function(value: Any, run: Translation) -> None:
        if value is True or value in ("true", "default", "True"):
            run.ignore("the default")
        elif isinstance(value, str) and value.startswith("pissa"):
            run.set(f"{MODEL}lora_init", value)
        else:
            run.plan("lora_init", value)

    return by(function, f"{MODEL}lora_init", note="pissa and pissa_niter_N")


def find_rule(table: Mapping[str, Rule], key: str) -> Rule | None:
    """Find the rule of a key: its own, or that of a family, such as `galore_*`."""
    if key in table:
        return table[key]
    families = (name for name in table if name.endswith("*") and key.startswith(name[:-1]))
    return table.get(max(families, key=len, default=""))


def tokenizer(model_key: str) -> Rule:
    """Set a separate tokenizer; `model_key` is the trainer's key of the model, whose own tokenizer is the default."""

    def function(value: Any, run: Translation) -> None:
        if value == run.get(model_key):
            run.ignore("the model's tokenizer")
        else:
            run.set(f"{MODEL}tokenizer_name_or_path", value)

    return by(function, f"{MODEL}tokenizer_name_or_path")


def template(*neutral: str) -> Rule:
    """Set a chat template by its name."""

    def function(value: Any, run: Translation) -> None:
        if value in neutral:
            run.ignore("the tokenizer's template")
        elif value in TEMPLATES:
            run.set(f"{DATA}template", TEMPLATES[value])
        elif str(value).endswith("_nothink"):
            run.set(f"{DATA}template_arguments", {"enable_thinking": False})
            run.differs("the tokenizer's own template is used, without thinking; compare them with `thresher inspect`")
        else:
            run.plan("named_template", value)

    return by(function, f"{DATA}template", note=f"{', '.join(TEMPLATES)}")


def template_argument(name: str | None = None) -> Rule:
    """Set an argument of the chat template, or all of them."""

    def function(value: Any, run: Translation) -> None:
        given = dict(value) if name is None else {name: value}
        run.set(f"{DATA}template_arguments", {**(run.value(f"{DATA}template_arguments") or {}), **given})

    return by(function, f"{DATA}template_arguments")


def samples() -> Rule:
    """Generate answers at each evaluation."""

    def function(value: Any, run: Translation) -> None:
        if value:
            run.set("samples.num_prompts", 16)
            run.note("policy and reference answer the first validation prompts at each evaluation")
        else:
            run.ignore("off")

    return by(function, "samples.num_prompts")


def track(name: str) -> Function:
    """Add a tracker if the value is true."""

    def function(value: Any, run: Translation) -> None:
        if value:
            run.set("track_with", [*(run.value("track_with") or ["console"]), name])
        else:
            run.ignore("off")

    return function


def set_reference_free(value: Any, run: Translation) -> None:
    """Compare with a reference that gives every response the same probability."""
    if value:
        run.set("reference.mode", "none")
    else:
        run.ignore("there is a reference")


def set_split(value: Any, run: Translation) -> None:
    """Hold out a share of the training pairs, unless there is other validation data."""
    share = float(value or 0)
    if run.value(VALIDATION_FILES):
        run.ignore("there is validation data")
    elif 0 < share < 1:
        run.set(VALIDATION_SPLIT, share)
        run.differs("the share is held out by prompt, so the pairs are others than there")
    elif share:
        run.lacks("a number of pairs cannot be held out; set validation.split to a share")
    else:
        run.ignore("nothing is held out")


def drop(note: str, *keys: str) -> dict[str, Rule]:
    """Make rules for keys without an equivalent that do not change the training; a text may hold several keys."""
    return dict.fromkeys(" ".join(keys).split(), Rule(note=note))


def lack(note: str, keys: str | Mapping[str, Any]) -> dict[str, Rule]:
    """Make rules for keys without an equivalent that change the training: joined with spaces, or with defaults."""
    values = dict.fromkeys(keys.split()) if isinstance(keys, str) else keys
    return {key: lacks(note, default) for key, default in values.items()}
