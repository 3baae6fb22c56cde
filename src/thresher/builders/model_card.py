"""The model card of an export: README.md, whose YAML header the Hugging Face Hub reads.

Its facts come from the checkpoint and from the run's logs. Both may be from another machine and malicious, so every
text is escaped. Local paths become bare names, and settings that say where a run was, not what it did, are left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from thresher import durable
from thresher.builders.checkpoints import find_logs, read_stored
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manifest import read_manifest
from thresher.data.prepare.report import PrepareReport
from thresher.errors import UserError
from thresher.models.loading.location import hub_name
from thresher.models.loading.weight_files import config_of, find_file
from thresher.observability.log_files import DESCRIPTION, METRICS
from thresher.observability.machine import environment
from thresher.observability.trackers.jsonl import read_metrics
from thresher.redact import escape_control_chars, redact, redact_text

logger = logging.getLogger(__name__)

CARD = "README.md"
_HOMEPAGE = "https://github.com/thresher-ai/thresher"
_HUB_DATASET = re.compile(r"hf://(?:datasets/)?([\w-][\w.-]*/[\w-][\w.-]*)")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{1,63}")  # the Hub's identifiers
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#!&~$@])")
_SIGNATURE = re.compile(r"\n<!-- thresher ([0-9a-f]{64}) -->\n$")
_LONGEST_TEXT = 500
# where a run was, and who followed it
_PLACES = {
    *("output_dir", "logging_dir", "cache_dir", "dataset_dir", "exp_name", "resume_from_checkpoint", "ray_address"),
    *("system_envs", "runtime", "track_with", "tracker_kwargs", "judge_url", "judge_key_variable"),
}
# settings whose values are files of the run's machine unless they have a scheme, and names of models or files
_FILES = {"file_name", "store", "prompts_file"}
_NAMES = {
    *("pretrain", "model_name_or_path", "tokenizer_name_or_path", "adapter_name_or_path", "merge_adapters"),
    *("judge", "template", "pref_loss", "pref_loss_digests"),
}
# settings that are shown as they are; `/no_think` is a system prompt
_TEXTS = {"system_prompt", "judge_instructions", "template_arguments"}


def write_card(directory: Path, text: str) -> None:
    """Write README.md with a digest of itself, unless there is one to keep."""
    file = directory / CARD
    if not is_to_keep(file):
        durable.replace(file, f"{text}\n<!-- thresher {_digest(text)} -->\n".encode())


def is_to_keep(file: Path) -> bool:
    """Whether a README.md is there that thresher did not write, or that was edited; warn that it is kept."""
    if not file.exists():
        return False
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = _SIGNATURE.search(text)
    if found is not None and found[1] == _digest(text[: found.start()]):
        return False
    logger.warning("%s was kept, because it is not as thresher wrote it; delete it to get a new model card", file)
    return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()


def model_card(
    checkpoint: Path,
    base: str,
    name: str,
    *,
    adapter_alone: bool = False,
    is_reward_model: bool = False,
    merge_into: str | None = None,
    quantization: str | None = None,
    **metadata: Any,
) -> str:
    """Describe the export of a checkpoint.

    Args:
        checkpoint: what was exported; the run's logs are found from it.
        base: path or Hub name of the model that the run started from.
        name: the title, and the name to load the model by.
        adapter_alone: PEFT's adapter was exported, not a model.
        is_reward_model: it has one output per response.
        merge_into: the model that the adapter was merged into, if that was not the base.
        quantization: of the base that an adapter belongs to.
        metadata: of the header, such as `license`; None leaves a default.
    """
    from huggingface_hub import ModelCardData

    config = read_stored(_mapping(load_json(checkpoint / "config.json")))
    logs = find_logs(checkpoint, config)
    losses = loss_names(config)
    tags = ["thresher", *("dpo" if each == "sigmoid" else each for each in losses if re.fullmatch(r"\w+", each))]
    description = _read_description(logs)
    pipeline, auto_class = "text-generation", "AutoModelForCausalLM"
    if adapter_alone:
        auto_class = "AutoPeftModelForCausalLM"
    elif is_reward_model:
        pipeline, auto_class = "text-classification", "AutoModelForSequenceClassification"
    elif _is_multimodal(merge_into or base):
        pipeline, auto_class = "image-text-to-text", "AutoModelForImageTextToText"
    named = hub_name(merge_into or base)
    header: dict[str, Any] = {
        "base_model": named,
        "base_model_relation": None if named is None else "adapter" if adapter_alone else "finetune",
        "library_name": "peft" if adapter_alone else "transformers",
        "pipeline_tag": pipeline,
        "datasets": _hub_datasets(config) or None,
        **_license(merge_into or base),
    }
    header |= {key: value for key, value in metadata.items() if value is not None}
    header["tags"] = list(dict.fromkeys([*tags, *header.pop("tags", ())]))
    data = ModelCardData(**{key: value for key, value in header.items() if value is not None})
    shown = _text(name)
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {shown}\n",
        _summary(base, merge_into, adapter_alone=adapter_alone),
        f"## Use\n\n{_usage(name, auto_class, quantization)}",
        f"## Training\n\n{_table(('', ''), _training(checkpoint, base, config, description))}",
        "" if merge_into else _evaluation(checkpoint, logs),
        f"<details><summary>Config</summary>\n\n{_fenced(public_config(config), 'yaml')}\n</details>\n",
        f"## Versions\n\n{', '.join(f'{_text(key)} {_text(value)}' for key, value in _versions(description))}\n",
    ]
    return escape_control_chars("\n".join(part for part in parts if part))


def loss_names(config: Mapping[str, Any]) -> list[str]:
    """The names of a stored config's losses."""
    losses = config.get("pref_loss", "sigmoid")
    return list(map(str, losses if isinstance(losses, list | Mapping) else [losses]))


def public_config(config: Mapping[str, Any]) -> str:
    """Return a config as YAML without secrets, places and local paths."""
    return yaml.safe_dump(redact(_public(config)), sort_keys=False, allow_unicode=True, width=120)


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _public_value(str(key), value) for key, value in values.items() if key not in _PLACES}


def _public_value(key: str, value: Any) -> Any:
    if key in _TEXTS:
        return value
    if isinstance(value, Mapping):
        # the names of losses may be files
        is_named = key in ("pref_loss", "pref_loss_digests")
        return _public({bare_name(str(name)): each for name, each in value.items()} if is_named else value)
    if isinstance(value, list):
        return [_public_value(key, each) for each in value]
    if not isinstance(value, str):
        return value
    if key in _NAMES | _FILES:
        return bare_name(value, is_file=key in _FILES)
    return bare_name(value) if _is_local(value) else value


def _is_local(text: str) -> bool:
    # not Path.exists, which raises if a text is too long for a file's name
    return text.startswith(("/", "~/", "file:/")) or ("/" in text and os.path.exists(text))  # noqa: PTH110


def bare_name(value: str, *, is_file: bool = False) -> str:
    """Shorten a path or URL to its last part; a name on the Hugging Face Hub stays."""
    if value.startswith("hf://") or (not is_file and hub_name(value) is not None):
        return value
    return re.split(r"[?#]", value)[0].rstrip("/\\").replace("\\", "/").rpartition("/")[2] or "a local file"


def _hub_datasets(config: Mapping[str, Any]) -> list[str]:
    args = _mapping(_mapping(config.get("actor_train")).get("data_args"))
    sources = [args, *map(_mapping, _mapping(args.get("sources")).values())]
    names = [name for each in sources for name in _list(each.get("file_name")) if isinstance(name, str)]
    return list(dict.fromkeys(found[1] for name in names if (found := _HUB_DATASET.match(name))))


def _license(base: str) -> dict[str, str | None]:
    """The licence that the base's own model card states."""
    from huggingface_hub import ModelCard

    try:
        file = find_file(base, CARD)
        stated = {} if file is None else ModelCard.load(file).data.to_dict()
    except (OSError, ValueError, UserError, yaml.YAMLError, RecursionError):
        return {}
    found = {key: stated.get(key) for key in ("license", "license_name", "license_link")}
    if not isinstance(found["license"], str) or not _LICENSE.fullmatch(found["license"]):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str) and len(value) < _LONGEST_TEXT}


def _summary(base: str, merge_into: str | None, *, adapter_alone: bool) -> str:
    what = "A LoRA adapter for" if adapter_alone else "A fine-tune of"
    by = f"by [thresher]({_HOMEPAGE}) {version('thresher')}"
    if merge_into is None:
        return f"{what} {_linked(base)}, trained on preferences {by}.\n"
    return (
        f"{_linked(merge_into)} with an adapter merged into it that was trained on {_linked(base)} {by}. It is not the "
        "model that was trained, so its evaluation is not shown.\n"
    )


def _linked(path: str) -> str:
    name = hub_name(path)
    return f"`{_code(bare_name(path))}`" if name is None else f"[{_text(path)}](https://huggingface.co/{name})"


def _is_multimodal(path: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    try:
        kind = None if path.endswith(".gguf") else config_of(path).get("model_type")
    except (UserError, AttributeError, RecursionError):
        return False
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def _usage(name: str, auto: str, quantization: str | None) -> str:
    quoted = json.dumps(escape_control_chars(name), ensure_ascii=False)
    imports = (
        f"from transformers import {auto}, AutoTokenizer"
        if not auto.startswith("AutoPeft")
        else f"from peft import {auto}\nfrom transformers import AutoTokenizer"
    )
    code = f"{imports}\n\nmodel = {auto}.from_pretrained({quoted})\ntokenizer = AutoTokenizer.from_pretrained({quoted})"
    note = (
        f"\nThe adapter belongs to its base in {_text(quantization)}: unless the base's files are quantized, pass the "
        "same `BitsAndBytesConfig` as `quantization_config`. Above the original weights, the model is a different "
        "one.\n"
    )
    return _fenced(code, "python") + (note if quantization else "")


def _training(
    checkpoint: Path, base: str, config: Mapping[str, Any], description: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    facts, data = _read_facts(description, config), _mapping(description.get("data"))
    args = _mapping(_mapping(config.get("actor_train")).get("training_args"))
    yield "base model", _text(bare_name(base))
    for role, heading in (("train", "data"), ("validation", "validation data")):
        yield from _data(_mapping(data.get(role)), heading)
    # a description of the run's newest start; the config is the checkpoint's
    yield "loss", _text(facts.get("loss") or " + ".join(map(bare_name, loss_names(config))))
    for name in ("parameters", "reference"):
        if name in facts:
            yield name, _text(facts[name])
    yield "steps", f"{read_manifest(checkpoint).step:,} of {_text(facts.get('steps', 'the run'))}"
    for name in ("learning_rate", "lr_scheduler_type", "optim"):
        if name in args:
            yield name.replace("_", " "), _text(args[name])


def _read_facts(description: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a run, with the paths of its config shortened."""
    facts = {str(name): str(fact) for name, fact in _mapping(description.get("facts")).items()}
    paths: set[str] = set()
    for values in (config, _mapping(description.get("config"))):
        roles = (_mapping(_mapping(values.get(role)).get("model_args")) for role in ("actor_train", "reference"))
        names = ("pretrain", "model_name_or_path", "adapter_name_or_path")
        paths.update(loss_names(values), (str(each.get(name) or "") for each in (values, *roles) for name in names))
    for path in sorted(paths - {""}, key=len, reverse=True):  # one may be the start of another
        facts = {name: fact.replace(path, bare_name(path)) for name, fact in facts.items()}
    return facts


def _data(role: Mapping[str, Any], heading: str) -> Iterator[tuple[str, str]]:
    """The sources of a role's data by name, with their counts."""
    parts = _mapping(role.get("parts")) or ({"": role} if role else {})
    for part, values in ((str(part), _mapping(each)) for part, each in parts.items()):
        where = f"{heading} {_text(part)}".strip()
        try:
            report = PrepareReport.from_json(values["report"])
            files = ", ".join(dict.fromkeys(_text(bare_name(file.name, is_file=True)) for file in report.files))
            counts = ", ".join(f"{_text(count)} {int(number):,}" for count, number in report.count_rows())
            yield where, f"{files}: {counts}"
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError):  # none, or a damaged one
            yield where, f"{_text(values.get('pairs'))} {_text(values.get('kind', 'pairs'))}"


def _evaluation(checkpoint: Path, logs: Path | None) -> str:
    manifest = read_manifest(checkpoint)
    found = {name: value for name, value in manifest.metrics.items() if name.startswith("eval")}
    if not found:
        return ""
    first: Mapping[str, Any] = next((each for each in _read_metrics(logs) if each["step"] == 0), {})
    rows = ((_text(name), _number(first.get(name)), _number(value)) for name, value in found.items())
    headings = ("on the validation data", "before (step 0)", f"this model (step {manifest.step:,})")
    return f"## Evaluation\n\n{_table(headings, rows)}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _versions(description: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The packages that the run was trained with; this machine's if it left no description."""
    for name, value in (_mapping(description.get("environment")) or environment()).items():
        if name == "system":  # and hardware follow
            return
        yield str(name), value


def _read_description(logs: Path | None) -> Mapping[str, Any]:
    try:
        return {} if logs is None else redact(_mapping(json.loads((logs / DESCRIPTION).read_bytes())))
    except (OSError, ValueError, RecursionError):
        return {}


def _read_metrics(logs: Path | None) -> list[dict[str, Any]]:
    try:
        return [] if logs is None else read_metrics(logs / METRICS)
    except (OSError, ValueError, UserError):
        return []


def _table(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = (headings, ("---",) * len(headings), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(value: object) -> str:
    """Escape a text for a line or a table cell of Markdown, where HTML would be interpreted too."""
    line = " ".join(redact_text(str(value)).split())[:_LONGEST_TEXT]
    return _MARKDOWN.sub(r"\\\1", line)


def _code(value: str) -> str:
    return " ".join(value.replace("`", "'").split())[:_LONGEST_TEXT]


def _fenced(text: str, language: str) -> str:
    """Put a text between fences that it does not contain."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
