"""The command, Python and YAML blocks of README.md, docs/get-started/ and docs/migrate/ run as they are printed.

A page is a session: its blocks run in order, and directory and exported variables carry over from one to the next. A
block after a line that ends in "`NAME`:" is written to the file NAME; if a command has written that file, it must mean
the same. YAML blocks without a name change the config of the page or of the quickstart, and must be valid together with
it. ```text blocks are not run. A Hub model that a page names is a directory of that name, so nothing is downloaded.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import toy_strategy
from tests.support.forks import python
from tests.support.paths import ROOT
from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer
from thresher.config import parse_config
from thresher.importers.convert import DIALECTS
from thresher.importers.read import recognize

QUICKSTART = ROOT / "docs" / "get-started" / "quickstart.md"
PAGES = [
    ROOT / "README.md",
    *sorted(
        page
        for section in ("get-started", "migrate")
        for page in (ROOT / "docs" / section).glob("*.md")
        if page.name != "index.md"
    ),
]
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
REPOSITORY = "https://github.com/thresher-ai/thresher"
ROW = {"prompt": "What is two plus two?", "chosen": "Two plus two is four.", "rejected": "I do not care."}
RUN = {"bash", "python"}
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([\w./-]+\.\w+)`:\s*\Z")
_INSTALLS = re.compile(r"^\s*(pip install|scripts/install)\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the file that the line before it names."""

    language: str
    text: str
    name: str | None


@dataclass
class Session:
    """A shell that a reader of a page types into."""

    directory: Path
    environment: dict[str, str]
    state: Path = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.directory.with_name("shell-state")

    def run(self, block: Block) -> None:
        restore = f'. "{self.state}"\n' if self.state.exists() else ""
        keep = f'trap \'export -p > "{self.state}"; pwd > "{self.state}.directory"\' EXIT\n'
        # the text of a Python block is an argument, so that the shell does not read it
        script = 'python -c "$1"' if block.language == "python" else block.text
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", restore + keep + script, "bash", block.text],  # noqa: S607
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        output = f"{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
        assert ran.returncode == 0, f"{block.text}\nexit code {ran.returncode}\n{output}"
        self.directory = Path(Path(f"{self.state}.directory").read_text().rstrip("\n"))

    def write(self, name: str, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        named = _NAMED.search(text[: match.start()])
        found.append(Block(match[1], match[2], named[1] if named else None))
    return found


def named_files(page: Path) -> dict[str, str]:
    return {block.name: block.text for block in blocks(page) if block.name}


def configs(page: Path) -> list[dict[str, Any]]:
    """Parse the page's own configs; the configs of other trainers on it are not ours to validate."""
    values = [yaml.safe_load(text) for name, text in named_files(page).items() if name.endswith(".yaml")]
    return [each for each in values if not is_foreign(each)]


def is_foreign(values: Mapping[str, Any]) -> bool:
    """Whether another trainer's config, or one of ROLL that has keys which thresher reads in another place."""
    trainer = recognize(values, DIALECTS)
    return trainer is not None and (trainer.name != "roll" or "num_nodes" in values)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], value) for key, value in change.items() if isinstance(base.get(key), Mapping)}
    return {**base, **change, **both}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Keys and texts of a config, at any depth."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from leaves(each, str(name))
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, key)
    elif isinstance(value, str):
        yield key, value


def save_chat_model(directory: Path) -> None:
    """Write a tiny Llama with a byte-level tokenizer and a chat template, so that it reads any text."""
    tokenizer = make_tokenizer(pad_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(directory)


def write_or_compare(session: Session, name: str, text: str) -> None:
    """Write a printed file; one that a command has written must be the same config, whatever its comments say."""
    path = session.directory / name
    if not path.exists():
        session.write(name, text)
    elif path.read_text(encoding="utf-8") != text:
        written, printed = (parse_config(yaml.safe_load(each)) for each in (path.read_text(encoding="utf-8"), text))
        assert written == printed, f"{name} is printed differently"


def provide(session: Session, files: Mapping[str, str], needed: list[dict[str, Any]], made: str = "") -> None:
    """Write files, and what configs name and nothing else wrote: models, and 64 rows of data.

    made: the directory whose files the page's own commands make.
    """
    for name, text in files.items():
        session.write(name, text)
    for key, value in (leaf for config in needed for leaf in leaves(config)):
        path = session.directory / value
        if key in ("pretrain", "model_name_or_path") and not path.exists():  # a Hub name is a directory here
            save_chat_model(path)
        elif key == "file_name" and "://" not in value and not path.exists() and not (made and value.startswith(made)):
            session.write(value, (json.dumps(ROW) + "\n") * 64)


def checkout(directory: Path) -> Path:
    """Copy the files of the repository and commit them, so that they can be cloned."""
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)  # noqa: S607
    if listed.returncode:
        pytest.skip("no git checkout, so no list of its files")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "Copy"]):
        subprocess.run([*git, *arguments], cwd=directory, check=True)
    return directory


def installing_session(tmp_path: Path, clones: bool) -> Session:
    """A session without network in a new virtual environment that finds all requirements but thresher itself."""
    copy = checkout(tmp_path / "source")
    environment_dir = tmp_path / "environment"
    venv.create(environment_dir, with_pip=True)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {
        **reader_environment(tmp_path),
        "PATH": f"{environment_dir / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(environment_dir),
        # not a .pth file: scripts/install makes an environment of its own. Paths given here are not searched for .pth
        # files, so the thresher that runs these tests is not found through them
        "PYTHONPATH": os.pathsep.join(packages),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # 0 turns isolation off: pip uses the hatchling that is there
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{copy.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }
    start = tmp_path / "reader" if clones else copy
    start.mkdir(exist_ok=True)
    return Session(start, environment)


def reader_environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    program_dir = str(Path(sys.executable).parent)  # not resolved: the python of a virtual environment is a link
    forked = tmp_path / "forked"
    forked.mkdir()
    for name, arguments in {"python": "", "thresher": "-m thresher"}.items():
        (forked / name).write_text(f'#!/bin/sh\nexec {shlex.join(python())} {arguments} "$@"\n')
        (forked / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {
        **inherited,
        "HOME": str(tmp_path / "home"),
        "PATH": os.pathsep.join([str(forked), program_dir, os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


# CI follows the demo and the quickstart in scripts/first-hour, and checks the YAML blocks of all pages
BY_HAND = ("README.md", "demo.md", "install.md", "quickstart.md", "next-steps.md", "from-trl.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.hand] * (page.name in BY_HAND))
        for page in PAGES
    ],
)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    found = blocks(page)
    commands = "".join(block.text for block in found if block.language == "bash")
    assert any(block.language in RUN for block in found)
    if _INSTALLS.search(commands):
        session = installing_session(tmp_path, clones="git clone" in commands)
    else:
        (tmp_path / "reader").mkdir()
        session = Session(tmp_path / "reader", reader_environment(tmp_path))
        shutil.copytree(ROOT / "examples", session.directory / "examples")
    own = named_files(page)
    # a page without a config continues the quickstart, unless it is about writing one
    has_config = page.parent.name == "migrate" or any(name.endswith(".yaml") for name in own)
    base = own if has_config else named_files(QUICKSTART)
    # a page that makes its model gets nothing but the files of the checkout
    needed = [] if "make_tiny_model.py" in commands else configs(page) or configs(QUICKSTART)
    if HUB_MODEL in page.read_text(encoding="utf-8"):
        save_chat_model(session.directory / HUB_MODEL)
    for block in found:
        if block.name:
            write_or_compare(session, block.name, block.text)
        elif block.language in RUN:
            made = "thresher-demo/" if re.search(r"^thresher demo$", commands, re.MULTILINE) else ""
            provide(session, {} if base is own else base, needed, made)
            session.run(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_yaml_block_is_a_valid_change_of_the_config(page: Path) -> None:
    base = (configs(page) or configs(QUICKSTART))[0]
    for block in blocks(page):
        if block.language == "yaml" and not (block.name and is_foreign(yaml.safe_load(block.text))):
            change = yaml.safe_load(block.text)
            parse_config(change if block.name else merged(base, change))


GUIDES = sorted(
    page for section in ("train", "scale", "operate", "concepts") for page in (ROOT / "docs" / section).glob("*.md")
)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_the_imports_of_a_guide_resolve(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guides name files that are not there, so only their imports run; the package of an engine is there."""
    monkeypatch.syspath_prepend(toy_strategy.install(tmp_path))
    for block in blocks(page):
        if block.language == "python":
            imports = [each for each in ast.parse(block.text).body if isinstance(each, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(imports, []), str(page), "exec"), {})  # noqa: S102


def test_the_quickstart_is_a_whole_run() -> None:
    """What the other tests need of it: files, a config, and commands that train and export."""
    assert "dpo.yaml" in named_files(QUICKSTART)
    commands = "".join(block.text for block in blocks(QUICKSTART) if block.language == "bash")
    assert {"thresher train", "thresher export"} <= set(re.findall(r"^thresher \w+", commands, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_of_the_checkout_is_printed_as_it_is(page: Path) -> None:
    for name, text in named_files(page).items():
        if (ROOT / name).exists():
            assert text == (ROOT / name).read_text(encoding="utf-8"), f"{page} prints another {name}"


def test_no_command_has_a_placeholder_that_cannot_run() -> None:
    """Addresses and names in capitals belong into text and tables."""
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash":
                assert not re.search(r"\b(HEAD|MODEL_DIR|CONFIG\.yaml|STORE|DIR)\b", block.text), (page, block.text)
