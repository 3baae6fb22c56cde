"""docs/reference/config.md and docs/reference/import-keys: their tables are what the code says today."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.support.paths import ROOT
from thresher.config import DPOConfig
from thresher.config.section import Section, inner_section, known_keys
from thresher.importers.convert import DIALECTS
from thresher.importers.roll import our_keys


@pytest.fixture(scope="module")
def config_doc() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_doc", ROOT / "scripts" / "config_doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_schema_says(config_doc: ModuleType) -> None:
    page = config_doc.PAGE.read_text(encoding="utf-8")
    assert page == config_doc.with_tables(page, config_doc.render()), "stale; run scripts/make-config-doc"


def test_the_pages_of_other_trainers_are_what_their_tables_say(config_doc: ModuleType) -> None:
    pages = config_doc.render_imports()
    written = {path.name: path.read_text(encoding="utf-8") for path in config_doc.IMPORT_PAGES.glob("*.md")}
    index = written.pop("index.md")
    assert written == pages, "stale; run scripts/make-config-doc"
    assert [name for name in pages if f"]({name})" not in index] == []
    for dialect in DIALECTS:
        page = pages[f"{dialect.name}.md"] + pages["transformers.md"]
        assert [
            key for key in (*dialect.table, *dialect.neutral) if f"`{key}`" not in page and key not in our_keys()
        ] == []


def test_every_key_has_a_row(config_doc: ModuleType) -> None:
    tables = config_doc.render()
    sections = config_doc.find_places()
    for cls in sections:
        for name in cls.model_fields:
            assert inner_section(cls, name) in sections or f"| `{name}` |" in tables, name
    assert {key.rpartition(".")[2] for key, _ in known_keys(DPOConfig)} <= {
        n for cls in sections for n in cls.model_fields
    }


def test_a_key_without_a_docstring_is_rejected(config_doc: ModuleType) -> None:
    class Bare(Section):
        """A section."""

        key: int = 1

    with pytest.raises(ValueError, match="config key key has no docstring"):
        config_doc._table(Bare, {"": Bare()}, ["key"], None)


def test_a_page_without_markers_is_rejected(config_doc: ModuleType) -> None:
    with pytest.raises(ValueError, match="must contain the lines"):
        config_doc.with_tables("# Config\n", "")
