"""`thresher import` on the command line, and the other commands on a config of another trainer."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from thresher.cli.import_config import entries_table, fold_at_dots
from thresher.importers.convert import DIALECTS
from thresher.importers.translation import Dialect, Entry


@pytest.mark.parametrize("command", [("train",), ("config", "show")])
def test_a_foreign_config_is_named_with_the_command_that_converts_it(
    command_line, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("base_model: m\nrl: dpo\n")
    result = command_line(*command, str(path))
    assert result.code == 2
    assert f"{path} is a config of axolotl; convert it with: thresher import {path} -o dpo.yaml" in result.err


def test_import_writes_a_config_and_reports_every_key_on_request(command_line, tmp_path: Path) -> None:
    path, output = tmp_path / "theirs.yaml", tmp_path / "dpo.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\nmax_length: 64\nlog_level: info\n")
    result = command_line("import", str(path), "-o", str(output), "--all")
    assert result.code == 0, result.err
    for word in (
        "renamed",
        "translated",
        "changes nothing",
        "max_length",
        "sequence_length",
        "log_level",
        "(default)",
    ):
        assert word in result.err
    assert yaml.safe_load(output.read_text())["sequence_length"] == 64
    assert "exists; remove it" in command_line("import", str(path), "-o", str(output)).err


def test_import_shows_what_differs_names_what_changes_nothing_and_counts_the_rest(command_line, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\nmax_length: 64\nlog_level: info\nload_in_4bit: true\n")
    shown = command_line("import", str(path), "--force").err
    assert "max_length" not in shown
    assert "renamed" not in shown
    assert shown.index("load_in_4bit") < shown.index("dataset_name") < shown.index("log_level")
    assert "not translated, because they change nothing here: log_level" in " ".join(shown.split())
    counted = re.search(
        r"(\d+) other keys and (\d+) defaults of TRL mean the same here or have no effect; --all shows them",
        " ".join(shown.split()),
    )
    assert counted
    assert int(counted[1]) == 2  # model_name_or_path and max_length
    assert int(counted[2]) > 0


def test_long_keys_are_folded_at_their_dots() -> None:
    folded = fold_at_dots("actor_train.training_args.learning_rate", 24)
    assert folded.split("\n") == ["actor_train.", "training_args.", "learning_rate"]
    assert fold_at_dots("max_steps", 24) == "max_steps"
    assert fold_at_dots("a.b.c", 24) == "a.b.c"


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_no_name_of_a_key_is_broken_in_80_columns(dialect: Dialect) -> None:
    """Every key of a trainer, and all keys here that it is read as."""
    entries = [Entry(key, 1, targets=list(rule.targets)) for key, rule in dialect.table.items()]
    console = Console(width=80, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(entries_table(dialect.title, entries))
    assert max(map(len, captured.get().splitlines())) == 80
    names = Counter(name for entry in entries for key in (entry.key, *entry.targets) for name in key.split("."))
    assert names - Counter(re.findall(r"\w+", captured.get())) == Counter()


def test_keys_that_change_the_training_are_shown_first() -> None:
    lost = Entry("load_in_4bit", True, outcome="no equivalent", changes_numbers=True)
    kept = Entry("push_to_hub", True, outcome="no equivalent")
    table = entries_table("TRL", [Entry("max_length", 64), kept, Entry("d", 1, outcome="different meaning"), lost])
    assert list(table.columns[0].cells) == [
        *("[bold]changes the training[/]", "load_in_4bit: True"),
        *("[bold]different meaning[/]", "d: 1"),
        *("[bold]no equivalent[/]", "push_to_hub: True"),
        *("[bold]translated[/]", "max_length: 64"),
    ]


def test_import_fails_where_the_numbers_would_change_unless_forced(command_line, tmp_path: Path) -> None:
    path, output = tmp_path / "theirs.yaml", tmp_path / "dpo.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\nload_in_4bit: true\n")
    result = command_line("import", str(path), "-o", str(output))
    assert result.code == 1
    assert "load_in_4bit changes the training and has no equivalent" in " ".join(result.err.split())
    assert not output.exists()
    assert command_line("import", str(path), "-o", str(output), "--force").code == 0
    assert "load_in_4bit: only the base below an adapter can be quantized" in output.read_text()


def test_the_tables_of_other_trainers_need_no_torch() -> None:
    """An unknown key in a config is explained without waiting for torch."""
    program = "import sys, thresher.cli.import_config, thresher.importers.convert; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
