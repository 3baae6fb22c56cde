"""Translate another trainer's config: a rule per key, values under our keys, and an entry for what each key became.

A dialect's table maps each key that matters to a rule: the key here, a function that translates the value, or the
reason why there is no equivalent. Keys that only steer memory, placement, logging or other methods are patterns in
`neutral`: one rule says that they change nothing here. Any other key is unknown, and stops an import if it is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from thresher.config.roles import OF_NEW_ADAPTERS

MODEL = "actor_train.model_args."
TRAINING = "actor_train.training_args."
DATA = "actor_train.data_args."
STRATEGY = "actor_train.strategy_args."
ENGINE = f"{STRATEGY}strategy_config."
FILES = f"{DATA}file_name"
SOURCES = f"{DATA}sources"
EVAL_FILES = "validation.data_args.file_name"
EVAL_SPLIT = "validation.split"
SETS = "validation.sets"

Outcome = Literal[
    "kept", "renamed", "translated", "different meaning", "no equivalent", "no effect", "changes nothing here"
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# keys for log-probabilities and answers, which a reward model does not have
_OF_POLICIES = (
    *("ld_alpha", "rpo_alpha", "use_wpo", "f_divergence_type", "f_alpha_divergence_coef"),
    "samples.num_prompts",
)
_NO_WARMUP = "the schedule `constant` has no warm-up, there and here"
_UNSET: tuple[Any, ...] = (None, False, "", [], {}, "none", "None", "no")


@dataclass(frozen=True)
class Rule:
    """How one key is handled."""

    targets: tuple[str, ...] = ()  # keys here
    note: str = ""
    function: Callable[[Any, Translation], None] | None = None  # without one, the value is copied to the first target
    differs: bool = False
    changes_numbers: bool = False  # without a target: whether the setting changes the training
    off: str = ""  # with a function: why a value that is false or empty has no effect
    neutral: tuple[Any, ...] = ()  # values that change nothing


NEUTRAL = Rule(note="changes nothing here")


@dataclass(frozen=True)
class Dialect:
    """Another trainer's config language."""

    name: str
    title: str
    table: Mapping[str, Rule]
    neutral: tuple[str, ...]  # patterns of keys that change nothing here
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # those that differ from ours, given the config's keys
    marks: tuple[frozenset[str], ...] = ()  # sets of keys, each of which identifies a config
    programs: tuple[str, ...] = ()  # what a shell script runs, as words
    implied: Mapping[str, Any] = field(default_factory=dict)  # keys that its programs stand for

    def find(self, key: str) -> Rule | None:
        """Return the rule for a key; None for a key that is not known here."""
        if key in self.table:
            return self.table[key]
        return NEUTRAL if any(fnmatchcase(key, pattern) for pattern in self.neutral) else None


@dataclass
class Entry:
    """How one key was handled."""

    key: str
    value: Any
    is_default: bool = False
    outcome: Outcome = "translated"
    targets: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changes_numbers: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether the setting changes the training and has no equivalent."""
        return self.outcome == "no equivalent" and self.changes_numbers


class Translation:
    """A config under translation: rules read `get` and write `set`."""

    def __init__(self, dialect: Dialect, given: Mapping[str, Any], defaults: Mapping[str, Any], num_devices: int):
        self.dialect = dialect
        self.num_devices = num_devices
        self.entries: list[Entry] = []
        self.source = {**defaults, **given}
        self._given = given
        self._flat: dict[str, Any] = {}

    @property
    def values(self) -> dict[str, Any]:
        """The config under our keys."""
        return nest(self._flat)

    @property
    def lost(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.is_lost]

    @property
    def defaults_written(self) -> dict[str, str]:
        """Our keys that hold a default of the trainer, with the trainer's key."""
        return {target: entry.key for entry in self.entries if entry.is_default for target in entry.targets}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of another key of the source, or the trainer's default."""
        return self.source.get(key, default)

    def gives(self, key: str) -> bool:
        return key in self._given

    def value(self, target: str) -> Any:
        """Return what was set under one of our keys."""
        return self._flat.get(target)

    def set(self, target: str, value: Any) -> None:
        self._flat[target] = value
        self.use(target)

    def use(self, target: str) -> None:
        """Record that the current key is expressed by one of thresher's."""
        entry = self.entries[-1]
        if target not in entry.targets:
            entry.targets.append(target)

    def note(self, text: str) -> None:
        self.entries[-1].notes.append(text)

    def differs(self, note: str) -> None:
        """Record that the current key means something else here."""
        self.entries[-1].outcome = "different meaning"
        self.note(note)

    def drop(self, note: str, *, changes_numbers: bool = False) -> None:
        """Record that the current key has no equivalent."""
        entry = self.entries[-1]
        entry.outcome, entry.changes_numbers = "no equivalent", changes_numbers
        entry.notes.append(note)

    def lacks(self, note: str) -> None:
        """Record that the current key has no equivalent and changes the training."""
        self.drop(note, changes_numbers=True)

    def ignore(self, note: str) -> None:
        """Record that the current key has no effect with its value."""
        self.entries[-1].outcome = "no effect"
        self.note(note)

    def unset(self, target: str, note: str, outcome: Outcome = "no effect") -> None:
        """Remove one of our keys again; the entries that set it alone get the note."""
        if target not in self._flat:
            return
        del self._flat[target]
        for entry in self.entries:
            if target in entry.targets:
                entry.targets.remove(target)
                if not entry.targets and entry.outcome != "no equivalent":
                    entry.outcome = outcome
                    entry.notes.append(note)

    def unset_section(self, section: str, note: str, outcome: Outcome = "no effect") -> None:
        for target in [each for each in self._flat if each.startswith(section)]:
            self.unset(target, note, outcome)

    def apply(self, key: str, value: Any, rule: Rule | None) -> None:
        """Apply the rule of one key."""
        entry = Entry(key, value, is_default=key not in self._given)
        self.entries.append(entry)
        if rule is None:
            if any(value is unset or value == unset for unset in _UNSET):
                self.ignore("not set")
            else:
                self.lacks(f"not a key of {self.dialect.title} that is known here")
        elif rule is NEUTRAL:
            entry.outcome = "changes nothing here"
        elif rule.off and not value:
            self.ignore(rule.off)
        elif rule.function is not None:
            try:
                rule.function(value, self)
            except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
                self.lacks(f"a value that {self.dialect.title} would not accept")
            self._compare(entry)
        elif rule.targets and value in rule.neutral:
            self.ignore("neutral value")
        elif rule.targets:
            self.set(rule.targets[0], value)
            self._compare(entry)
            if rule.differs:
                self.differs(rule.note)
            elif rule.note:
                self.note(rule.note)
        elif rule.changes_numbers and any(value is each or value == each for each in (*_UNSET, *rule.neutral)):
            self.ignore("neutral value")
        else:
            self.drop(rule.note, changes_numbers=rule.changes_numbers)

    def _compare(self, entry: Entry) -> None:
        """Call a value that did not change kept or renamed."""
        if entry.outcome != "translated" or len(entry.targets) != 1 or entry.notes:
            return
        target = entry.targets[0]
        ours = self._flat.get(target)
        if type(ours) is type(entry.value) and ours == entry.value:
            entry.outcome = "kept" if _leaf(entry.key) == _leaf(target) else "renamed"

    def add_devices(self) -> None:
        """Give each process of the launcher a device; without it, the number of pairs per step would change."""
        if self.num_devices > 1 and "actor_train.device_mapping" not in self._flat:
            devices = f"list(range(0,{self.num_devices}))"
            self.entries.append(Entry("processes", self.num_devices))
            self.set("actor_train.device_mapping", devices)
            if self.value(f"{MODEL}lora_rank") is None and self.needs_reference:
                self.set("reference.device_mapping", devices)

    def add_empty(self, key: str) -> None:
        """Report an option without a value; a path must be set before the run can start, so it is not lost."""
        rule = self.dialect.find(key)
        target = rule.targets[0] if rule is not None and rule.targets else None
        is_path = target in ("pretrain", "output_dir", "logging_dir", f"{MODEL}tokenizer_name_or_path")
        self.entries.append(Entry(key, ""))
        text = "empty in the script, or computed by a command" + (f"; set `{target}`" if target else "")
        self.drop(text, changes_numbers=target is not None and not is_path)

    @property
    def has_several_devices(self) -> bool:
        """Whether the launcher or the config names more than one device."""
        nodes = self.get("cluster.gpus_per_node", 1), self.get("cluster.num_nodes", 1)
        return self.num_devices > 1 or bool(self.get("actor_train.device_mapping")) or max(nodes) > 1

    @property
    def losses(self) -> list[str]:
        names = self.value("pref_loss") or "sigmoid"
        return [names] if isinstance(names, str) else list(names)

    @property
    def needs_reference(self) -> bool:
        """Whether a loss compares with a reference; this imports torch."""
        from thresher.losses import loss_class, loss_names

        return any(loss not in loss_names() or loss_class(loss).needs_reference for loss in self.losses)

    @property
    def trains_rewards(self) -> bool:
        """Whether the policy is a reward model; this imports torch."""
        from thresher.losses import loss_class, loss_names

        return any(loss in loss_names() and loss_class(loss).trains_rewards for loss in self.losses)

    def tidy(self) -> None:
        """Remove settings that have no effect together with the others, which validation would reject."""
        from thresher.losses import loss_names, parameter_defaults

        names, trains_rewards = " + ".join(self.losses), self.trains_rewards
        known = [parameter_defaults(loss) for loss in self.losses if loss in loss_names()]
        of_policies = _OF_POLICIES if trains_rewards else ()
        for parameter in ("beta", "label_smoothing", "cpo_alpha", "discopop_tau", *of_policies):
            if not any(parameter in parameters for parameters in known):
                self.unset(parameter, f"{names} has no {parameter}")
        if not self.needs_reference:
            self.unset_section("reference.", f"{names} has no reference")
        if trains_rewards and self.value(f"{STRATEGY}strategy_name") == "megatron_train":
            note = "megatron_train does not train reward models; fsdp2_train does"
            self.unset_section(STRATEGY, note, "no equivalent")
        is_validated = self.value(EVAL_FILES) or self.value(SETS)
        if is_validated:
            for name in ("template", "template_arguments", "system_prompt", "truncation"):
                if self.value(f"{DATA}{name}") is not None:
                    self._flat.setdefault(f"validation.data_args.{name}", self.value(f"{DATA}{name}"))
        self._limit_each_source()
        has_adapter = self.value(f"{MODEL}adapter_name_or_path") is not None
        uses_lora = has_adapter or self.value(f"{MODEL}lora_rank") is not None
        of_new = " ".join(OF_NEW_ADAPTERS)
        schedule, warmup = self.value(f"{TRAINING}lr_scheduler_type"), self.value(f"{TRAINING}warmup_steps")
        batch, trackers = self.value(f"{TRAINING}global_batch_size"), set(self.value("track_with") or ())
        is_evaluated = is_validated or self.value(EVAL_SPLIT)
        evaluation = (
            "eval_strategy eval_steps eval_on_start metric_for_best_model greater_is_better samples.num_prompts"
        )
        for is_unused, section, names, note in (
            (has_adapter, MODEL, f"lora_rank lora_alpha lora_target {of_new}", "read from the adapter"),
            (uses_lora, MODEL, "freeze_module_prefix", "LoRA trains adapters only"),
            (not uses_lora, MODEL, f"lora_alpha lora_dropout lora_target {of_new}", "LoRA is off"),
            (schedule == "constant", TRAINING, "warmup_steps warmup_ratio", _NO_WARMUP),
            (warmup, TRAINING, "warmup_ratio", "warmup_steps takes precedence"),
            (self.value(f"{TRAINING}warmup_ratio") and not warmup, TRAINING, "warmup_steps", "warmup_ratio is set"),
            (schedule != "cosine_with_min_lr", TRAINING, "min_lr_ratio", "the schedule has no minimum"),
            (batch, TRAINING, "gradient_accumulation_steps", "follows from the global batch"),
            ("wandb" not in trackers, "tracker_kwargs.wandb_", "project entity mode api_key", "wandb is off"),
            ("mlflow" not in trackers, "tracker_kwargs.", "mlflow_tracking_uri", "mlflow is off"),
            ("tensorboard" not in trackers, "tracker_kwargs.", "tensorboard_dir", "tensorboard is off"),
            ("trackio" not in trackers, "tracker_kwargs.", "trackio_project", "trackio is off"),
            (not {"wandb", "mlflow", "trackio"} & trackers, "tracker_kwargs.", "name", "no tracker has names"),
            (not {"wandb", "mlflow"} & trackers, "tracker_kwargs.", "notes tags", "wandb and mlflow are off"),
            (not is_evaluated, "", evaluation, "there is no validation data"),
            (not is_evaluated, TRAINING, "per_device_eval_batch_size", "there is no validation data"),
        ):
            for name in names.split() if is_unused else ():
                self.unset(f"{section}{name}", note)

    def _limit_each_source(self) -> None:
        """Move max_samples into each source."""
        sources, key = self.value(SOURCES), f"{DATA}max_samples"
        if not isinstance(sources, dict) or not isinstance(limit := self.value(key), int):
            return
        del self._flat[key]
        for each in sources.values():
            name = "count" if "count" in each else "max_samples"
            each[name] = min(each.get(name, limit), limit)
        for entry in self.entries:
            entry.targets = [SOURCES if target == key else target for target in entry.targets]

    def settle(self) -> None:
        """Leave out targets that were not set after all."""
        for entry in self.entries:
            entry.targets = [target for target in entry.targets if target in self._flat]
            if not entry.targets and entry.outcome in ("kept", "renamed", "translated"):
                entry.outcome = "no effect"


def translate(
    dialect: Dialect,
    config: Mapping[str, Any],
    *,
    num_devices: int = 1,  # processes that its launcher starts
    empty: Iterable[str] = (),  # options of a script that have no value
    with_defaults: bool = True,
) -> Translation:
    """Translate a config of another trainer.

    Without `with_defaults`, the config is a part of one: only the given keys are translated, the rest keeps our
    defaults, and settings without effect are left to validation.
    """
    flat = flatten(config, {*dialect.table, *dialect.neutral})
    given = {**dialect.implied, **{key: value for key, value in flat.items() if value is not None}}
    defaults = dialect.defaults({"processes": num_devices, **given}) if with_defaults else {}
    run = Translation(dialect, given, defaults, num_devices)
    # in the order of the table: a rule may read what the rules above it have set
    order = {key: position for position, key in enumerate(dialect.table)}
    for key in sorted({**given, **run.source}, key=lambda key: order.get(key, len(order))):
        run.apply(key, run.get(key), dialect.find(key))
    run.add_devices()
    for key in empty:
        run.add_empty(key)
    if with_defaults:
        run.tidy()
    run.settle()
    run.entries = [entry for entry in run.entries if entry.targets or entry.is_lost or not entry.is_default]
    return run


def flatten(values: Mapping[str, Any], whole: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Join nested keys with dots; a key in `whole` keeps its mapping."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in whole:
            flat |= flatten(value, whole, f"{key}.")
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undo the dots of flat keys."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        section = nested
        for name in sections:
            section = section.setdefault(name, {})
        # a section can be set as a whole, and a key of it by another rule
        section[last] = {**value, **section.get(last, {})} if isinstance(value, Mapping) else value
    return nested


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
