"""Names and defaults that README and docs put in code font are those of the code, as the links are.

Checked are paths, dotted names below `thresher`, identifiers, config keys, commands with their options, extras, and
defaults that stand beside a key. The changelog is history, and the keys of other trainers are generated: both are left
out. A name that is right but not ours belongs into EXTERNAL.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import config_doc
import pytest
import typer
from markdown_it import MarkdownIt

from tests.support.paths import ROOT
from thresher.cli import app

SOURCE = ROOT / "src" / "thresher"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "import-keys" not in path.parts),
]
CODE_FOLDERS = ("src", "tests", "scripts", "benchmarks", "examples", "docs/extensions", ".github", ".ci")
# names of other projects that our code does not contain, and files that do not exist until somebody creates them
EXTERNAL = {
    "--num-nodes",  # sky launch
    "--shutdown-timeout",  # ray job
    "DistributedConfig",  # transformers
    "MemTracker",  # torch
    "VirtualModels",  # ROLL
    "benchmarks/llama3_h100_202412_torchtitan.md",  # torchtitan
    "compute_reference_log_probs",  # ROLL
    "config_qlora",  # the alignment handbook
    "field_rejected",  # axolotl
    "linear_cross_entropy",  # torch
    "model_args.max_length=4096",  # lm-eval
    "reward_accuracy",  # ColossalChat
    "varlen_attn",  # torch
}
_FILE = re.compile(r"[\w-]+\.(?:jsonl?|ya?ml|html|md|parquet|safetensors|toml|txt|log|csv)")
_OPTION = re.compile(r"--[a-z][a-z-]+")
_DEFAULT = re.compile(
    r"`(?P<key>[a-z][\w.]*)`(?: \((?:default|by default):? `?(?P<first>[^`\s,;)]+)`?"
    r"|,? (?:which )?(?:is|defaults to|has the default|default:?) `(?P<second>[^`\s]+)` by default"
    r"|,? defaults to `?(?P<third>[^`\s,;)]+)`?)"
)


def code_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the inline code of a page, with its line."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "inline" and token.map is not None:
            line = token.map[0] + 1
            for child in token.children or []:
                line += child.type in ("softbreak", "hardbreak")
                if child.type == "code_inline":
                    yield line, " ".join(child.content.split())


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of all bash blocks that start thresher, with their line; continued lines are joined."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "fence" and token.info.split()[:1] in (["bash"], ["console"], ["sh"]) and token.map:
            joined, start = "", token.map[0] + 2
            for number, line in enumerate(token.content.splitlines(), token.map[0] + 2):
                joined += line.rstrip("\\")
                if not line.endswith("\\"):
                    if re.match(r"\s*(\$ )?thresher ", joined):
                        yield start, joined.strip().removeprefix("$ ")
                    joined, start = "", number + 1


@cache
def identifiers() -> frozenset[str]:
    """Every word of the code, including messages and the keys of other trainers."""
    found: set[str] = set()
    for folder in CODE_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (
                "",
                ".py",
                ".sh",
                ".yaml",
                ".yml",
                ".toml",
                ".jinja",
                ".json",
                ".cfg",
            ):
                if path.name == Path(__file__).name or path.stat().st_size > 500_000:
                    continue
                found.update(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8", errors="replace")))
    found.update(re.findall(r"[A-Za-z_]\w*", (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    return frozenset(found)


@cache
def options_in_code() -> frozenset[str]:
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for folder in CODE_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in ("", ".py", ".sh", ".yaml", ".yml") and path.stat().st_size < 500_000
        if path != Path(__file__)  # names options that do not exist
    ]
    own = {f"--{name}" for command in cli().values() for name in command}
    return frozenset(own | {option for text in texts for option in _OPTION.findall(text)})


@cache
def cli() -> dict[str, set[str]]:
    """The options of every command, without dashes, by its words after `thresher`."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, words: str) -> None:
        found[words] = {opt.lstrip("-") for param in command.params for opt in (*param.opts, *param.secondary_opts)}
        for word, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{words} {word}".strip())

    walk(typer.main.get_command(app), "")
    return found


@cache
def config_keys() -> dict[str, str]:
    """The default of every key by each of its full paths."""
    return {
        f"{prefix}.{key.name}".lstrip("."): key.default.strip("`")
        for chapter in config_doc.chapters()
        for prefix in chapter.prefixes
        for key in chapter.keys
    }


@cache
def config_sections() -> set[str]:
    """Every section by its full path."""
    return {".".join(parts[:n]) for path in config_keys() for parts in [path.split(".")] for n in range(1, len(parts))}


def _is_config_path(path: str) -> bool:
    """Whether a path, or what it leaves out at its start, names a key or a section."""
    known = {*config_keys(), *config_sections()}
    if any(key == path or key.endswith(f".{path}") for key in known):
        return True
    # a mapping such as additional_configs or system_envs has keys of its own
    parent = path.rpartition(".")[0]
    return any(key.endswith(parent) for key, default in config_keys().items() if default == "{}") if parent else False


def _members(path: Path, name: str) -> set[str] | None:
    """The names that a module defines (without `name`), or the attributes of one of its classes; None if not found."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not name:
        return set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {word for inner in ast.walk(node) for word in _defined(inner)} | ({"*"} if node.bases else set())
    return None


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


def dotted_problem(name: str) -> str | None:
    """Say what is wrong with a dotted name below `thresher`, without importing it."""
    place, words = SOURCE, name.split(".")[1:]
    while words and (place / words[0]).is_dir():
        place /= words.pop(0)
    if words and (place / f"{words[0]}.py").is_file():
        place = place / f"{words.pop(0)}.py"
    module = place if place.is_file() else place / "__init__.py"
    if not words:
        return None
    if words[0] not in (_members(module, "") or ()):
        return f"{module.relative_to(ROOT)} has no {words[0]}"
    return None


def path_problem(word: str) -> str | None:
    """Say what is wrong with a path of the repository."""
    first = word.split("/")[0]
    homes = [home for home in (ROOT, SOURCE, ROOT / "docs") if (home / first).is_dir() and first not in ("", ".", "..")]
    looks_ours = first in ("src", "tests", "scripts", "benchmarks", "docs", "examples", ".github", ".ci")
    if not homes or not (looks_ours or word.endswith(".py")):
        return None
    pattern = re.sub(r"<\w+>|[A-Z]{2,}", "*", word).rstrip("/")
    return None if any(next(home.glob(pattern), None) for home in homes) else "no such file or folder"


def command_problem(line: str) -> str | None:
    """Say what is wrong with a command line of thresher."""
    try:
        words = shlex.split(line, comments=True)[1:]
    except ValueError:
        return None  # a part of a quoted text
    command, options = "", set(cli()[""])
    for position, word in enumerate(words):
        if re.fullmatch(r"[|&;<>].*", word):
            break
        if word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            if name not in options | {"help", "install-completion", "show-completion", "version"} and not re.fullmatch(
                r"-?[\d.]+", name
            ):
                return f"thresher {command} has no option {word}"
        elif f"{command} {word}".strip() in cli():
            command = f"{command} {word}".strip()
            options |= cli()[command]
        elif position == 0 and re.fullmatch(r"[a-z][a-z-]*", word):
            return f"there is no command thresher {word}"
        elif command == "eval":
            continue  # its settings are those of lm-eval
        elif (setting := re.fullmatch(r"[+~]*([a-z][\w.]*)=.*", word)) and not _is_config_path(setting[1]):
            return f"there is no config key {setting[1]}"
    return None


def word_problem(word: str) -> str | None:
    """Say what is wrong with a piece of inline code."""
    if word in EXTERNAL or _FILE.fullmatch(word):
        return None
    if word.isupper() and not word.startswith("THRESHER_"):
        return None  # a variable of another program, or a placeholder
    if re.fullmatch(r"thresher( [\w./=,'\[\]{}:-]+)+", word):
        return command_problem(word)
    if re.fullmatch(r"thresher(\.\w+)+(\(\))?", word):
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
        return None if word in groups else dotted_problem(word.removesuffix("()"))
    if re.fullmatch(r"[\w.*<>-]+(/[\w.*<>-]+)+/?", word):
        return path_problem(word)
    if re.fullmatch(r"--[a-z][a-z-]+", word):
        return None if word in options_in_code() else "no program here has this option"
    if key := re.fullmatch(
        r"((?:actor_train|reference|validation|samples|tracker_kwargs|model_args|training_args|"
        r"data_args|strategy_args|strategy_config)(?:\.\w+)+)(?:[=:].*)?",
        word,
    ):
        return None if _is_config_path(key[1]) else "no such config key"
    if name := re.fullmatch(r"([A-Za-z_]\w*)((?:\.[a-z_]\w*)?)(\(.*\))?", word):
        if name[2] and not (name[1][0].isupper() or name[3]):
            return None  # a file name, or an attribute of an object of the example
        if name[3] and not name[2] and hasattr(builtins, name[1]):
            return None
        is_name = "_" in name[1].strip("_") or name[1].startswith("_") or re.match(r"[A-Z]+[a-z]+\w*[A-Z]", name[1])
        if (is_name or (name[3] and not name[2])) and name[1] not in identifiers():
            return f"the code has no {name[1]}"
        if name[2] and name[1] in identifiers() and name[1][0].isupper() and name[2][1:] not in identifiers():
            return f"the code has no {name[2][1:]}"
    return None


def default_problems(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield defaults that stand beside a key and are not the schema's."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _DEFAULT.finditer(line):
            stated = next(filter(None, (match["first"], match["second"], match["third"])))
            own = {
                value
                for path, value in config_keys().items()
                if path == match["key"] or path.endswith(f".{match['key']}")
            }
            if own and not any(_same(stated, value) for value in own):
                yield number, match["key"], f"its default is {' or '.join(sorted(own))}, not {stated}"


def _same(stated: str, value: str) -> bool:
    plain = stated.replace(",", "").rstrip(".")
    try:
        return float(plain) == float(json.loads(value))
    except (ValueError, TypeError):
        return plain in (value, {"none": "absent"}.get(value))


def problems(text: str) -> list[tuple[int, str, str]]:
    """Return line, name and reason of everything that is wrong on a page."""
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    found = [(line, word, why) for line, word in code_words(text) if (why := word_problem(word))]
    found += [(line, word, why) for line, word in commands(text) if (why := command_problem(word))]
    found += default_problems(text)
    for number, line in enumerate(text.splitlines(), 1):
        for named in re.findall(r"(?:thresher|(?<![\w\]])\.)\[([a-z][a-z,]*)\]", line):
            found += [(number, f"[{extra}]", "no such extra") for extra in named.split(",") if extra not in extras]
    return sorted(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_on_a_page_is_one_of_the_code(page: Path) -> None:
    shown = page.relative_to(ROOT)
    wrong = [f"{shown}:{line}: `{word}`: {why}" for line, word, why in problems(page.read_text(encoding="utf-8"))]
    assert wrong == [], "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("see `tests/no_such_test.py`", "no such file"),
        ("see `engines/no_such_file.py`", "no such file"),
        ("`thresher.pipeline.NoSuchClass`", "has no NoSuchClass"),
        ("`_no_such_function` and others", "the code has no _no_such_function"),
        ("`NoSuchHelper` does it", "the code has no NoSuchHelper"),
        ("`no_such_call()` does it", "the code has no no_such_call"),
        ("`actor_train.training_args.learning_rat`", "no such config key"),
        ("`thresher trein dpo.yaml`", "no command thresher trein"),
        ("`thresher export RUN --outputt DIR`", "has no option --outputt"),
        ("```bash\nthresher train dpo.yaml \\\n  betta=0.2\n```", "no config key betta"),
        ("`--no-such-option`", "no program here"),
        ("pip install 'thresher[no]'", "no such extra"),
        ("`max_restarts` (default 7)", "its default is 5, not 7"),
        ("`save_total_limit` defaults to 4", "its default is 3, not 4"),
    ],
)
def test_a_stale_name_is_reported(text: str, reason: str) -> None:
    assert [why for _, _, why in problems(text) if reason in why], problems(text)


@pytest.mark.parametrize(
    "text",
    [
        "`tests/docs/test_names.py`, `engines/accumulate.py`, `tests/` and `path/to/file.py`",
        "`thresher.DPOTrainer`, `thresher.pipeline.DPOPipeline` and `torch.cuda.is_available()`",
        "`actor_train.training_args.learning_rate=1e-6`, `model_args.lora_rank` and `beta`",
        "`thresher train dpo.yaml beta=0.2`, `thresher cache prune --older-than 30` and `--plain`",
        "`max_restarts` (default 5), `reference.sync_alpha` (default `0.6`), `pip install '.[report]'`",
    ],
)
def test_a_name_of_the_code_is_accepted(text: str) -> None:
    assert problems(text) == []
