"""Makers of the rules that several trainers share: copies, switches, choices, losses, LoRA, templates and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from thresher.importers.translation import DATA, ENGINE, EVAL_FILES, EVAL_SPLIT, MODEL, SETS, Rule, Translation

Table = dict[str, Rule]
Function = Callable[[Any, Translation], None]

# names of chat templates in other trainers that are a family here
TEMPLATES = {
    **{name: name for name in ("chatml", "gemma", "llama3", "mistral", "phi4", "qwen2_5", "qwen3")},
    "qwen_25": "qwen2_5",
    "phi_4": "phi4",
    "qwen3_nothink": "chatml",  # LLaMA-Factory: Qwen3's turns without the block of thoughts
}
# reasons why a setting of several trainers has no equivalent
QUANTIZED = "base weights are quantized by bitsandbytes only"
NAMED_TEMPLATE = "there is no template of this name here; the tokenizer's own template is used"
WRITE_TEMPLATE = f"write the template to a file and set {DATA}template to its path"
REFERENCE_ADAPTER = "the reference cannot have its own adapter; merge it into the model first"
FROZEN = "parameters are frozen by name prefix only; set freeze_module_prefix"
OTHER_METHOD = "this is not preference training"
OTHER_OPTIMIZER = (
    "the optimizers are adamw, adamw_8bit, paged_adamw_8bit, paged_adamw_32bit, schedule_free_adamw, adafactor, muon, "
    "rmsprop and sgd"
)
SHUFFLED = "pairs are shuffled every epoch"
VOCABULARY = "the tokenizer's vocabulary cannot be changed"
OTHER_CHECKPOINT = "checkpoints of another trainer cannot be resumed; give the model as `pretrain`"
PLAIN_TUNERS = "only full fine-tuning and LoRA are supported"

DATA_SUFFIXES = {".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".bz2", ".zst"}
_TRL_LOSSES = {"aot_pair": "aot", "aot_unpair": "aot_unpaired", "bco": "bco_pair"}
# the losses of TRL 1.x that read label_smoothing; its sigmoid ignores it, ours does not
_SMOOTHED = ("aot", "aot_unpaired", "exo_pair", "robust")
_KTO = "the reference point is the mean over the whole step, not over each micro-batch"
_IN_ORDER = "TRL takes the rows in the order of the file, here they are shuffled"
# losses whose numbers differ from every trainer's
_METHODS = {
    "kto": _KTO,
    "bradley_terry": "a new head starts at zero here, at random there; with LoRA it is trained too",
}
_IN_QUANTILES = "TRL sorts a micro-batch's pairs, thresher the whole step's: equal if a step is one micro-batch"
# losses whose numbers differ from TRL's
_DIFFERENT = {
    "aot": _IN_QUANTILES,
    "aot_unpaired": _IN_QUANTILES,
    "apo_zero_unpaired": _IN_ORDER,
    "kto": f"{_KTO}; {_IN_ORDER}; TRL splits rows of pairs, here each row needs a label",
    "bco_pair": "TRL classifies the rewards as they are, here minus their running mean",
    "sft": "TRL averages over all tokens of a micro-batch, here over each response, then over the pairs",
}


def to(target: str, note: str = "", *, differs: bool = False, neutral: tuple[Any, ...] = ()) -> Rule:
    """Copy the value to a key here; `differs` if the key means something else there, which the note explains."""
    return Rule((target,), note, differs=differs, neutral=neutral)


def kept(section: str, names: str) -> Table:
    """Copy keys to a section here, where they have the same names."""
    return {name: to(f"{section}{name}") for name in names.split()}


def by(function: Function, *targets: str, note: str = "", off: str = "") -> Rule:
    """Translate the value with a function; with `off`, only a value that is not false or empty."""
    return Rule(targets, note, function, off=off)


def converted(target: str, convert: Callable[[Any], Any]) -> Rule:
    """Set a key to the converted value."""
    return by(lambda value, run: run.set(target, convert(value)), target)


def part_of(key: str, target: str) -> Rule:
    """The rule of another key reads the value."""
    return Rule((target,), f"read with `{key}`", lambda _, run: run.use(target))


def lacks(note: str, *neutral: Any) -> Rule:
    """Report a setting without an equivalent that changes the training, unless its value is neutral."""
    return Rule(note=note, changes_numbers=True, neutral=neutral)


def lack(note: str, keys: str | Mapping[str, Any]) -> Table:
    """Make rules for keys without an equivalent that change the training: joined with spaces, or with defaults."""
    values = dict.fromkeys(keys.split()) if isinstance(keys, str) else keys
    return {key: lacks(note, default) for key, default in values.items()}


def drop(note: str, keys: str) -> Table:
    """Make rules for keys that do not change the training, with a note that a user needs."""
    return dict.fromkeys(keys.split(), Rule(note=note))


def switch(target: str, value: Any = None, *, off: str = "off", note: str = "") -> Rule:
    """Set a key if the setting is on: to `value`, or to the setting's own value."""

    def function(given: Any, run: Translation) -> None:
        run.set(target, given if value is None else value)
        if note:
            run.note(note)

    return by(function, target, off=off)


def choice(target: str, values: Mapping[Any, Any], *, lacks: str = "", ignore: str = "") -> Rule:
    """Translate a value by a table; any other value has no equivalent, or no effect."""

    def function(given: Any, run: Translation) -> None:
        if found := [ours for theirs, ours in values.items() if theirs == given]:
            run.set(target, found[0])
        elif lacks:
            run.lacks(lacks.format(given))
        else:
            run.ignore(ignore)

    return by(function, target)


def only_if(
    condition: Callable[[Translation], Any], target: str, off: str, change: Any = lambda value, _: value
) -> Rule:
    """Set a key to the changed value if a condition holds."""

    def function(value: Any, run: Translation) -> None:
        if condition(run):
            run.set(target, change(value, run))
        else:
            run.ignore(off)

    return by(function, target)


def if_loss(target: str, *losses: str) -> Rule:
    """Copy a parameter which only some losses have."""
    return only_if(lambda run: set(run.losses) & set(losses), target, f"only for {', '.join(losses)}")


def positive(target: str) -> Rule:
    """Copy a whole number above 0."""

    def function(value: Any, run: Translation) -> None:
        if int(value) > 0:
            run.set(target, int(value))
        else:
            run.ignore("off")

    return by(function, target, off="off")


def steps(target: str) -> Rule:
    """Copy a number of steps; a fraction of the run cannot be given."""

    def function(value: Any, run: Translation) -> None:
        if float(value) >= 1:
            run.set(target, int(value))
        else:
            run.drop("counted in steps here")

    return by(function, target)


def source_name(name: str, split: str | None = None, config: str | None = None, revision: str | None = None) -> str:
    """Name a dataset: a path or URL as it is, otherwise a dataset of the Hugging Face Hub."""
    if "://" in name or name.startswith(("/", ".", "~")) or PurePath(name).suffix in DATA_SUFFIXES:
        return name
    at = f"@{revision}" if revision else ""
    parts = [f"hf://{name}{at}", *([split or "train"] if split or config else []), *([config] if config else [])]
    return ":".join(parts)


def set_sources(run: Translation, target: str, names: list[str]) -> None:
    """Set one source or a list of sources."""
    run.set(target, names[0] if len(names) == 1 else names)


def ratio(value: Any, peak: Any) -> float:
    """Divide two rates that a person wrote in decimals: 1e-6 / 1e-5 is 0.1."""
    return float(f"{float(value) / float(peak):.12g}")


def set_split(value: Any, run: Translation) -> None:
    """Hold out a share of the training pairs, unless there is other validation data."""
    share = float(value or 0)
    if run.value(EVAL_FILES) or run.value(SETS):
        run.ignore("there is validation data")
    elif 0 < share < 1:
        run.set(EVAL_SPLIT, share)
        run.differs("the share is held out by prompt, so different pairs are held out here")
    elif share:
        run.lacks("a number of pairs cannot be held out; set validation.split to a share")
    else:
        run.ignore("nothing is held out")


def losses(weights_key: str, smoothing_key: str = "label_smoothing") -> Rule:
    """Read a loss or a list of losses as TRL does, with weights and label smoothing under other keys."""
    return by(lambda value, run: set_losses(value, run, weights_key, smoothing_key), "pref_loss", "label_smoothing")


def set_losses(value: Any, run: Translation, weights_key: str, smoothing_key: str = "label_smoothing") -> None:
    """Set pref_loss from TRL's names."""
    from thresher.losses import loss_names  # imports torch

    if any(map(callable, value if isinstance(value, list) else [value])):
        return run.lacks("name a function of your own by its file, as in pref_loss='path/to/file.py:function'")
    given = value if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
    names = [_TRL_LOSSES.get(name, name) for name in given]
    if unknown := [text for text, name in zip(given, names, strict=True) if name not in loss_names()]:
        return run.lacks(f"there is no loss {', '.join(map(str, unknown))}; `thresher losses` lists the losses")
    weights = run.get(weights_key)
    if isinstance(weights, list) and len(weights) != len(names):
        return run.lacks(
            f"{weights_key} has {len(weights)} weights for {len(names)} losses, which TRL refuses; give one weight "
            "per loss"
        )
    terms: dict[str, Any] = dict(zip(names, weights if isinstance(weights, list) else [1.0] * len(names), strict=True))
    smoothing, smoothed = run.get(smoothing_key), set(names) & set(_SMOOTHED)
    if smoothing and smoothed and "sigmoid" in terms:
        terms["sigmoid"] = {"weight": terms["sigmoid"], "label_smoothing": 0.0}
        run.note(f"{smoothing_key} is not for sigmoid, where TRL 1.x ignores it")
    is_single = len(names) == 1 and not isinstance(weights, list)
    run.set("pref_loss", names[0] if is_single else terms)
    if not smoothing and "exo_pair" in smoothed:
        run.differs(f"TRL refuses exo_pair without {smoothing_key}; here its default is 0.001")
    elif "robust" in smoothed and smoothing is None:
        run.set("label_smoothing", 0.0)
        run.note("TRL's default of label_smoothing is 0")
    for name in names:
        if name in _DIFFERENT:
            run.differs(f"{name}: {_DIFFERENT[name]}")
    return None


def set_method(loss: str, run: Translation) -> None:
    """Set the loss of a reward model or of KTO."""
    run.set("pref_loss", loss)
    run.differs(_METHODS[loss])


def _set_label_weight(value: Any, run: Translation, name: str) -> None:
    if "kto" in run.losses:
        run.set(name, value)
    elif "apo_zero_unpaired" in run.losses and value != 1:
        run.lacks("apo_zero_unpaired has no weights of labels; give the rows a column `weight`")
    else:
        run.ignore("only for kto")


def _set_label_smoothing(value: Any, run: Translation) -> None:
    smoothed = set(run.losses) & set(_SMOOTHED)
    if value and not smoothed and "sigmoid" in run.losses:
        run.drop("ignored with sigmoid by TRL 1.x, so it is left out; set label_smoothing for cDPO")
    elif value or ("robust" in smoothed and "exo_pair" not in smoothed):
        run.set("label_smoothing", value)
    else:
        run.ignore("no label smoothing")


def _set_cpo_alpha(value: Any, run: Translation) -> None:
    if "simpo" not in run.losses:
        run.ignore("only with simpo")
    else:
        run.set("rpo_alpha", value)
        run.differs("the NLL term of CPO-SimPO; TRL averages over the tokens of the batch, here per pair")


REWARDS = by(lambda _, run: set_method("bradley_terry", run), "pref_loss", off="off")
CPO_ALPHA = by(_set_cpo_alpha, "rpo_alpha", off="off")
LABEL_WEIGHTS: Table = {
    name: by(partial(_set_label_weight, name=name), name) for name in ("desirable_weight", "undesirable_weight")
}
LABEL_SMOOTHING = by(_set_label_smoothing, "label_smoothing", note="not with sigmoid, where TRL 1.x ignores it")


def quantization(
    is_lora: Callable[[Translation], Any], keys: Mapping[str, int | None], kind: str, double: str, *, is_double: bool
) -> Table:
    """Make the rules for bitsandbytes from the trainer's names of its settings.

    keys: switches, with the bits that they mean; None: the value is their number. is_double: without `double`.
    """
    target = f"{MODEL}quantization."

    def function(value: Any, run: Translation, meant: int | None) -> None:
        bits = int(meant or value)
        if bits not in (4, 8):
            return run.lacks("a base has 4 or 8 bits")
        if not is_lora(run):
            return run.lacks("only the base below an adapter can be quantized; use LoRA")
        run.set(f"{target}bits", bits)
        if bits == 4:
            run.set(f"{target}type", run.get(kind) or "nf4")
            given = run.get(double)
            run.set(f"{target}double", is_double if given is None else bool(given))
        return None

    rules = {key: by(partial(function, meant=bits), f"{target}bits", off="off") for key, bits in keys.items()}
    for key, name in ((kind, "type"), (double, "double")):
        if key:
            rules[key] = by(partial(_use_if_set, target=f"{target}{name}"), f"{target}{name}")
    return rules


def _use_if_set(_value: Any, run: Translation, target: str) -> None:
    if run.value(target) is None:
        run.ignore("only for 4 bits")
    else:
        run.use(target)


def lora_rules(
    is_lora: Callable[[Translation], Any],
    rank: str,
    *,
    alpha: str = "lora_alpha",
    dropout: str = "lora_dropout",
    targets: str = "",
    parameters: str = "",
    **kinds: str,
) -> Table:
    """Make the rules for a LoRA adapter from the trainer's names of its settings.

    kinds: of the settings in `_KINDS`, whose values are copied.
    """

    def number(value: Any, _: Translation) -> float:
        return float(value) if isinstance(value, float) and value % 1 else int(value)

    rules = {
        rank: only_if(is_lora, f"{MODEL}lora_rank", "LoRA is off"),
        alpha: only_if(is_lora, f"{MODEL}lora_alpha", "LoRA is off", number),
        dropout: only_if(is_lora, f"{MODEL}lora_dropout", "LoRA is off"),
    }

    def all_targets(value: Any, run: Translation) -> list[str]:
        named = run.get(parameters) if parameters else None
        return [*lora_targets(value, run), *(() if named is None else lora_targets(named, run))]

    if targets:
        rules[targets] = only_if(is_lora, f"{MODEL}lora_target", "LoRA is off", all_targets)
    if parameters:
        rules[parameters] = part_of(targets, f"{MODEL}lora_target")
    return rules | {
        key: replace(only_if(is_lora, f"{MODEL}{_KINDS[kind]}", "LoRA is off"), off="off")
        for kind, key in kinds.items()
    }


_KINDS = {
    "rslora": "use_rslora",
    "dora": "use_dora",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
    "exclude": "lora_exclude",
}


def modules_to_save(is_lora: Callable[[Translation], Any]) -> Rule:
    """Train modules whole besides the adapters."""

    def function(value: Any, run: Translation) -> None:
        names = [name for name in lora_targets(value, run) if name != "score"]
        if not is_lora(run):
            run.ignore("LoRA is off")
        elif not names:
            run.ignore("the head of a reward model is trained anyway")
        else:
            run.set(f"{MODEL}modules_to_save", names)
            if any(name.endswith(("embed_tokens", "lm_head")) for name in names):
                run.note("of a model that ties them, embedding and head stay tied and are both trained")

    return by(function, f"{MODEL}modules_to_save", off="off")


def lora_plus(is_lora: Callable[[Translation], Any]) -> Rule:
    """Copy LoRA+'s ratio of learning rates."""
    return only_if(is_lora, f"{MODEL}lora_plus_ratio", "LoRA is off")


def lora_targets(value: Any, run: Translation) -> list[str]:
    """Read the names of modules: a list, one name, or names joined with commas; `all` means all-linear."""
    if run.entries[-1].is_default and isinstance(value, list):
        run.note("PEFT's default for Llama, Mistral and Qwen; check it for other models")
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    return ["all-linear" if name in ("all", "all-linear", "all_linear", "ALL") else name for name in names]


def lora_switch(note: str, *, full: str | None = None) -> Rule:
    """Read the switch of LoRA: a boolean, or with `full` the name of a tuner."""

    def function(value: Any, run: Translation) -> None:
        if (value == "lora") if full else value:
            run.use(f"{MODEL}lora_rank")
        elif full and value != full:
            run.lacks(PLAIN_TUNERS)
        else:
            run.ignore("all weights are trained" if full else "LoRA is off")

    return by(function, f"{MODEL}lora_rank", note=note)


def _set_lora_init(value: Any, run: Translation) -> None:
    if value is True or value in ("true", "default", "True"):
        run.ignore("the default")
    elif isinstance(value, str) and (value == "olora" or value.startswith("pissa")):
        run.set(f"{MODEL}lora_init", value)
    else:
        run.lacks("LoRA starts at zero, with PiSSA or OLoRA; other initializations are not supported")


def _set_adapter(value: Any, run: Translation, *, is_new: str = "") -> None:
    paths = [path.strip() for path in value.split(",")] if isinstance(value, str) else list(value)
    if is_new:
        merged = paths if run.get(is_new) else paths[:-1]
        paths = paths[len(merged) :]
        if merged:
            run.set(f"{MODEL}merge_adapters", merged)
            run.note("the reference is the merged model")
    if len(paths) == 1:
        run.set(f"{MODEL}adapter_name_or_path", paths[0])
        run.note("the reference starts from the adapter too")
    elif paths:
        run.lacks("training starts from one adapter; name the others in actor_train.model_args.merge_adapters")


LORA_INIT = by(_set_lora_init, f"{MODEL}lora_init", note="olora, pissa and pissa_niter_N")
# the last adapter is continued, unless a new one is created, and the others are merged
ADAPTERS = by(
    partial(_set_adapter, is_new="create_new_adapter"), f"{MODEL}adapter_name_or_path", f"{MODEL}merge_adapters"
)
ADAPTER = by(_set_adapter, f"{MODEL}adapter_name_or_path", note="the reference starts from the adapter too")


def tokenizer(model_key: str) -> Rule:
    """Set a separate tokenizer; `model_key` is the trainer's key of the model, whose own tokenizer is the default."""
    return only_if(
        lambda run: run.entries[-1].value != run.get(model_key),
        f"{MODEL}tokenizer_name_or_path",
        "the model's tokenizer",
    )


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
            run.lacks(NAMED_TEMPLATE)

    return by(function, f"{DATA}template", note="a family that `template` knows")


def template_argument(name: str | None = None) -> Rule:
    """Set an argument of the chat template, or all of them."""

    def function(value: Any, run: Translation) -> None:
        given = dict(value) if name is None else {name: value}
        run.set(f"{DATA}template_arguments", {**(run.value(f"{DATA}template_arguments") or {}), **given})

    return by(function, f"{DATA}template_arguments")


SAMPLES = switch(
    "samples.num_prompts", 16, note="policy and reference answer the first validation prompts at each evaluation"
)


def track(name: str) -> Rule:
    """Add a tracker if the value is true."""

    def function(_: Any, run: Translation) -> None:
        run.set("track_with", [*(run.value("track_with") or ["console"]), name])

    return by(function, "track_with", off="off")


def size(name: str) -> Rule:
    """Set a parallel size, if the config says on how many devices it runs."""
    return by(lambda value, run: set_size(value, run, name), f"{ENGINE}{name}")


def set_size(value: Any, run: Translation, name: str) -> None:
    """Set a parallel size; one worker has no effect."""
    if value in (None, 1, -1):
        run.ignore("one worker")
    elif run.has_several_devices:
        run.set(f"{ENGINE}{name}", int(value))
    else:
        run.drop(f"does not change the numbers; set {ENGINE}{name} together with device_mapping")
