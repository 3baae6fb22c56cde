"""Datasets of another trainer: file names if all are treated alike, otherwise sources or evaluation sets by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thresher.config.data import TAKEN_NAMES
from thresher.importers.rules import DATA_SUFFIXES, set_sources, source_name
from thresher.importers.translation import DATA, EVAL_FILES, FILES, SETS, SOURCES, Translation

# keys here that datasets for training and for evaluation become
TRAINING_DATA = (FILES, SOURCES, "prompt_key", "chosen_key", "rejected_key")
EVALUATION_DATA = (EVAL_FILES, SETS)
_BUILDERS = ("json", "csv", "parquet", "arrow")
_FROM_START = "here the first rows are read"


@dataclass
class Dataset:
    """One dataset of a mixture, or for evaluation."""

    files: list[str]
    name: str = ""  # in the trainer's config
    columns: Mapping[str, str] | None = None  # by their name here; None if not known
    template: str | None = None
    weight: float = 1.0  # share of its rows
    count: int | None = None  # number of its rows, instead of a share


def named_files(
    path: str, files: Any = None, split: str | None = None, config: str | None = None, revision: str | None = None
) -> list[str]:
    """Name a dataset, or the `data_files` of one: local files, or files of a dataset of the Hub."""
    name = source_name(path, split, config, revision)
    if not files:
        return [name]
    if isinstance(files, Mapping):
        files = files[split or "train"]
    is_hub = name.startswith("hf://") and "/" in path and path not in _BUILDERS
    at = f"@{revision}" if revision else ""
    return [
        f"hf://datasets/{path}{at}/{file}" if is_hub and "://" not in file and not file.startswith("/") else file
        for file in (files if isinstance(files, list) else [str(files)])
    ]


def set_datasets(
    run: Translation,
    target: str,
    datasets: Sequence[Dataset],
    others: Sequence[Dataset] = (),
    *,
    is_named: bool = False,
    rows: str = "the same rows",
) -> None:
    """Set the training or the validation data.

    Args:
        target: FILES or EVAL_FILES.
        others: The data of the other target; settings outside of sources and sets hold for both.
        is_named: Whether each dataset needs a name, such as for its own metrics.
        rows: Which rows the trainer draws for a share, in every epoch.
    """
    is_training = target == FILES
    known = [each.columns for each in (*datasets, *others) if each.columns is not None]
    has_columns = any(columns != known[0] for columns in known)
    templates = {each.template for each in (*datasets, *others)}
    has_shares = any(each.weight != 1 or each.count is not None for each in datasets)
    if is_training:
        for name, column in (known[0] if known and not has_columns else {}).items():
            run.set(f"{name}_key", column)
        if len(templates) == 1 and datasets[0].template:
            run.set(f"{DATA}template", datasets[0].template)
    if not (is_named or has_columns or has_shares or len(templates) > 1):
        set_sources(run, target, [file for each in datasets for file in each.files])
        return
    sets: dict[str, dict[str, Any]] = {}
    for each in datasets:
        if each.weight < 0:
            raise ValueError("a negative share")
        if each.weight == 0:
            run.note(f"{each.files[0]} is left out, because its share is 0")
            continue
        sets[_free_name(each, sets)] = {
            "file_name": each.files[0] if len(each.files) == 1 else each.files,
            **({"columns": dict(each.columns)} if has_columns and each.columns else {}),
            **({"template": each.template} if len(templates) > 1 and each.template else {}),
            **(_share(each) if is_training else _limit(each, run)),
        }
    run.set(SOURCES if is_training else SETS, sets)
    if is_training and any(each.weight % 1 or each.count is not None for each in datasets):
        run.differs(
            f"{run.dialect.title} takes {rows} of a dataset in every epoch; here they are drawn by seed, and the next "
            "epoch visits others"
        )


def _share(each: Dataset) -> dict[str, Any]:
    if each.count is not None:
        return {"count": each.count}
    return {} if each.weight == 1 else {"weight": each.weight}


def _limit(each: Dataset, run: Translation) -> dict[str, Any]:
    """Evaluation sets have no share, only a number of rows from their start."""
    if each.count is not None:
        run.differs(_FROM_START)
        return {"max_samples": each.count}
    if each.weight != 1:
        run.lacks(f"a share of validation rows cannot be given; set max_samples in {SETS}")
    return {}


def _free_name(each: Dataset, taken: Mapping[str, Any]) -> str:
    """Name a dataset as in the trainer's config or as its file, with its split or a number if the name is taken."""
    scheme, _, rest = each.files[0].rpartition("://")
    path = re.split("[:@]" if scheme == "hf" else "[?]", rest)[0]
    split = rest.partition(":")[2].partition(":")[0] if scheme == "hf" else ""
    words = path.rstrip("/").rpartition("/")[2].split(".")
    while len(words) > 1 and f".{words[-1]}" in DATA_SUFFIXES:
        words.pop()
    name = _allowed(each.name) or _allowed(".".join(words)) or "data"
    with_split = [f"{name}-{_allowed(split)}"] if split else []
    names = (name, *with_split, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
    return next(text for text in names if text not in {*taken, *TAKEN_NAMES})


def _allowed(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")


def interleave(datasets: Sequence[Dataset], probabilities: Sequence[float | str], *, until_last: bool) -> None:
    """Give datasets the numbers of rows that are drawn until the first of them, or the last, is exhausted.

    That takes their numbers of rows: if the config does not state them, nothing is set.
    """
    shares = [float(each) for each in probabilities] or [1 / len(datasets)] * len(datasets)
    if all(each.count is not None for each in datasets):
        needed = [(each.count or 0) / share for each, share in zip(datasets, shares, strict=True)]
        draws = max(needed) if until_last else min(needed)
        for each, share in zip(datasets, shares, strict=True):
            each.count = round(draws * share)


def set_interleaved(_: Any, run: Translation) -> None:
    """Report how datasets are interleaved: as counts, if `interleave` could set them."""
    sources = run.value(SOURCES)
    if sources is None:
        run.ignore("there is one dataset")
    elif all("count" in each for each in sources.values()):
        run.use(SOURCES)
        run.differs("rows are drawn by chance there, and the counts here are the expected ones")
    else:
        run.lacks(
            "how many rows of each dataset are drawn depends on how many they have, which the config does not say; set "
            f"`count` of each in {SOURCES}"
        )
