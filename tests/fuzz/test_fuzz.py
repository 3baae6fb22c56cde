"""Any input of a reader is read or gives a documented error; hypothesis searches for and shrinks counterexamples.

`scripts/fuzz` runs the same checks on millions of cases, which it generates faster.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzz.cases import (
    CONFIG,
    CONFIG_WORDS,
    JSON_WORDS,
    KEYS,
    OVERRIDES,
    ROLES,
    VALID_ROWS,
    WORDS,
    YAML_WORDS,
)
from tests.support.fuzz.checks import (
    CacheCheck,
    ComposeCheck,
    ExactJsonCheck,
    ManifestCheck,
    StoreCheck,
    TemplateCheck,
    TensorIndexCheck,
    check_config,
    check_row,
)

SURROGATES = st.text(st.characters(codec=None), max_size=6)
TEXTS = st.one_of(st.lists(st.sampled_from(WORDS), max_size=4).map("".join), SURROGATES)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(KEYS), TEXTS), inner, max_size=4)
    ),
    max_leaves=12,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": TEXTS}), max_size=4)
COLUMNS = st.one_of(TEXTS, MESSAGES, VALUES)


@st.composite
def changed(draw: st.DrawFn, valid: Any, new: st.SearchStrategy[Any]) -> Any:
    """A valid mapping with some of its values changed, at any depth."""
    result = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(0, 3))):
        parent: Any = result
        while True:
            key = draw(st.sampled_from(sorted(parent)) if isinstance(parent, dict) else st.integers(0, len(parent) - 1))
            if isinstance(parent[key], dict | list) and parent[key] and draw(st.booleans()):
                parent = parent[key]
                continue
            parent[key] = draw(new)
            break
    return result


@st.composite
def mutated(draw: st.DrawFn, content: bytes, words: tuple[bytes, ...] = (b"\x00",)) -> bytes:
    """Bytes with a few ranges replaced."""
    result = content
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(result)))
        new = draw(st.one_of(st.binary(max_size=4), st.sampled_from(words)))
        result = result[:at] + new + result[at + draw(st.integers(0, 8)) :]
    return result


@given(st.one_of(VALUES, st.sampled_from(VALID_ROWS).flatmap(lambda row: changed(row, COLUMNS))))
def test_any_value_is_a_row_or_a_bad_row(value: Any) -> None:
    check_row(value)


@given(
    st.one_of(
        st.binary(), st.sampled_from(VALID_ROWS).flatmap(lambda row: mutated(json.dumps(row).encode(), JSON_WORDS))
    )
)
def test_any_line_is_a_row_or_a_bad_row(line: bytes) -> None:
    check_row(line)


@pytest.fixture(scope="module")
def template() -> TemplateCheck:
    return TemplateCheck()


SIDES = st.lists(TEXTS, min_size=1, max_size=3).map(
    lambda texts: [{"role": ("assistant", "user")[n % 2], "content": text} for n, text in enumerate(texts)]
)


@given(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(("user", "system", "tool")), "content": TEXTS}),
                min_size=1,
                max_size=3,
            ),
            "chosen": SIDES,
            "rejected": SIDES,
        },
        optional={"tools": st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2), "system": TEXTS},
    )
)
def test_only_the_template_writes_control_tokens(template: TemplateCheck, columns: dict[str, Any]) -> None:
    template(columns)


@given(st.one_of(VALUES, changed(CONFIG, st.one_of(VALUES, st.sampled_from(CONFIG_WORDS)))))
def test_any_values_are_a_config_or_a_user_error(values: Any) -> None:
    check_config(values)


@settings(max_examples=25)  # Hydra takes about 30 ms per example
@given(
    mutated(json.dumps(CONFIG, indent=1).encode(), YAML_WORDS),
    st.lists(st.one_of(st.sampled_from(OVERRIDES), TEXTS), max_size=2),
)
def test_any_yaml_and_overrides_are_a_config_or_a_user_error(
    tmp_path_factory: Any, yaml: bytes, overrides: list[str]
) -> None:
    ComposeCheck(tmp_path_factory.getbasetemp())(yaml, overrides)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: Any) -> ManifestCheck:
    return ManifestCheck(tmp_path_factory.mktemp("manifest"))


@given(st.data())
def test_any_bytes_are_the_manifest_or_a_checkpoint_error(manifest: ManifestCheck, data: st.DataObject) -> None:
    manifest(data.draw(st.one_of(st.binary(), mutated(manifest.content, JSON_WORDS))))


@pytest.fixture(scope="module")
def tensor_index(tmp_path_factory: Any) -> TensorIndexCheck:
    return TensorIndexCheck(tmp_path_factory.mktemp("index"))


@given(st.data())
def test_any_bytes_are_an_index_of_tensors_or_a_checkpoint_error(
    tensor_index: TensorIndexCheck, data: st.DataObject
) -> None:
    tensor_index(data.draw(st.one_of(st.binary(), mutated(tensor_index.content, JSON_WORDS))))


@given(st.data())
def test_any_bytes_are_exact_json_or_a_checkpoint_error(manifest: ManifestCheck, data: st.DataObject) -> None:
    ExactJsonCheck(manifest.directory.parent)(data.draw(st.one_of(st.binary(), mutated(manifest.content, JSON_WORDS))))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: Any) -> CacheCheck:
    return CacheCheck(tmp_path_factory.mktemp("cache"))


@given(st.data())
def test_a_damaged_cache_shard_gives_the_same_logps_or_none(cache: CacheCheck, data: st.DataObject) -> None:
    cache(data.draw(mutated(cache.content)), signed=data.draw(st.booleans()))


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> StoreCheck:
    return StoreCheck(tmp_path_factory.mktemp("store"))


@given(st.data())
def test_a_damaged_store_shard_is_read_or_a_user_error(store: StoreCheck, data: st.DataObject) -> None:
    store(data.draw(mutated(store.content)))
