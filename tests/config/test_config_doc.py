"""docs/reference/config.md and docs/reference/import-keys: they are what the code says today."""

from __future__ import annotations

import config_doc
import pytest

from thresher.config import DPOConfig
from thresher.config.section import Section, inner_section, known_keys
from thresher.importers.convert import DIALECTS
from thresher.importers.roll import our_keys


def test_the_page_is_what_the_schema_says() -> None:
    page = config_doc.PAGE.read_text(encoding="utf-8")
    assert page == config_doc.with_tables(page, config_doc.render()), "stale; run scripts/make-config-doc"


def test_the_pages_of_other_trainers_are_what_their_tables_say() -> None:
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


def test_every_key_is_on_the_page_with_all_its_places_as_anchors() -> None:
    chapters = config_doc.chapters()
    sections = config_doc.find_places()
    for cls in sections:
        titles = {config_doc.TITLES[each.__name__] for each in cls.__mro__ if each.__name__ in config_doc.TITLES}
        listed = {key.name for chapter in chapters if chapter.title in titles for key in chapter.keys}
        for name in cls.model_fields:
            assert inner_section(cls, name) in sections or name in listed, name
    anchors = [anchor for chapter in chapters for key in chapter.keys for anchor in key.anchors]
    assert len(anchors) == len(set(anchors))
    leaves = {key for key, _ in known_keys(DPOConfig) if not any(other.startswith(f"{key}.") for other in anchors)}
    assert leaves <= set(anchors) | {
        "actor_train.strategy_args.strategy_config",
        "reference.strategy_args.strategy_config",
    }
    assert {"deepspeed.zero_stage", "fsdp2.zero_stage", "actor_train.strategy_args.strategy_config.zero_stage"} <= set(
        anchors
    )


def test_a_key_without_a_docstring_is_rejected() -> None:
    class Bare(Section):
        """A section."""

        key: int = 1

    with pytest.raises(ValueError, match="config key key has no docstring"):
        config_doc._chapter("Bare", Bare, {"": Bare()}, ["key"], set())


def test_a_page_without_markers_is_rejected() -> None:
    with pytest.raises(ValueError, match="must contain the lines"):
        config_doc.with_tables("# Config\n", "")
