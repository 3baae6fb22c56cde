"""docs/reference/config.md: its tables are what the config's schema says today."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.support.paths import ROOT
from thresher.config import DPOConfig
from thresher.config.section import known_keys


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


def test_every_key_has_a_row(config_doc: ModuleType) -> None:
    tables = config_doc.render()
    for name, field in known_keys(DPOConfig):
        if config_doc.inner_section(field.annotation) is None:
            assert f"| `{name.rpartition('.')[2]}` |" in tables, name


def test_a_page_without_markers_is_refused(config_doc: ModuleType) -> None:
    with pytest.raises(ValueError, match="must hold the lines"):
        config_doc.with_tables("# Config\n", "")
