"""The start-up probe accepts the families that packed rows compute as transformers does, and says what others lack."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.support.bound_kernels import KERNELS, bind_kernel
from tests.support.probed_families import PACKED, PADDED, default_config
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import FAMILIES
from thresher.errors import UserError
from thresher.models import branching_state, probe
from thresher.models.attention import interface
from thresher.models.attention.segments import Segment
from thresher.models.layouts import choose_layout
from thresher.models.loading.load import load_model_config
from thresher.models.probe import DIRECTORY_NAME, shrink, what_packed_rows_lack


@pytest.fixture
def forgetful(monkeypatch, reference_cache) -> None:
    """Nothing is known from an earlier test or process."""
    monkeypatch.setattr(probe, "_found", {})
    monkeypatch.setattr(probe, "_failed", {})
    probe._warn_once.cache_clear()


@pytest.fixture
def compared(monkeypatch, forgetful) -> list[torch.nn.Module]:
    """The tiny models whose packed rows the probe compares with their own forward."""
    models, original = [], probe.check_logps

    def check(pairs, layout, examples):
        original(pairs, layout, examples)
        models.append(pairs.base_model)

    monkeypatch.setattr(probe, "check_logps", check)
    return models


@pytest.mark.parametrize("family", PACKED)
def test_a_family_at_its_published_size_passes(family, compared):
    """Its default config, of which the probe keeps one layer of each kind."""
    config = default_config(family)
    layout, note = choose_layout("auto", [config], None, 0, probe=what_packed_rows_lack)
    assert (layout.name, note) == ("shared", None)
    (model,) = compared
    whole, probed = config.get_text_config(), model.config.get_text_config()
    assert probed.model_type == whole.model_type
    assert set(getattr(probed, "layer_types", None) or ()) == set(getattr(whole, "layer_types", None) or ())
    assert list(probe._found.values()) == [None]


def test_a_width_of_the_scan_that_follows_from_the_hidden_size_shrinks_with_it(compared):
    sizes = {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48}
    granite = CONFIG_MAPPING["granitemoehybrid"](**sizes, layer_types=["linear_attention", "full_attention"] * 16)
    falcon = CONFIG_MAPPING["falcon_h1"](mamba_d_ssm=None, mamba_n_heads=128, mamba_d_head=64)
    assert [what_packed_rows_lack(each) for each in (granite, falcon)] == [None, None]
    assert len(compared) == 2


def test_a_family_passes_with_any_vocabulary():
    config = copy.deepcopy(FAMILIES["llama"])
    config.vocab_size = 20
    assert choose_layout("auto", [config], None, 0, probe=what_packed_rows_lack)[0].name == "shared"


@pytest.mark.parametrize("family", PADDED)
def test_a_family_that_is_rejected_says_what_is_missing(family):
    _, lacks = PADDED[family]
    layout, note = choose_layout("auto", [default_config(family)], None, 0, probe=what_packed_rows_lack)
    assert (layout.name, note) == ("padded", f"using layout padded: {lacks}")


def attention_that(change: Callable[..., tuple]) -> Callable[..., torch.Tensor]:
    """The attention of packed rows, with other arguments than the model's."""
    original = interface.segment_attention

    def wrong(query, key, value, visibility, scale, softcap, window, sinks):
        return original(query, key, value, *change(visibility, scale, softcap, window, sinks))

    return wrong


def everything_is_one_segment(visibility, *rest):
    rows = visibility.segments[-1].stop
    return dataclasses.replace(visibility, segments=(Segment(0, rows),)), *rest


WRONG = {
    "window": (
        "mistral",
        lambda visibility, scale, softcap, _window, sinks: (visibility, scale, softcap, None, sinks),
        "the model family mistral has a sliding window, which packed rows of it ignore",
    ),
    "window besides sinks": (
        "gpt_oss",
        lambda visibility, scale, softcap, _window, sinks: (visibility, scale, softcap, None, sinks),
        "the model family gpt_oss has a sliding window, which packed rows of it ignore",
    ),
    "sinks": (
        "gpt_oss",
        lambda visibility, scale, softcap, window, _sinks: (visibility, scale, softcap, window, None),
        "the model family gpt_oss has attention sinks, which packed rows of it ignore",
    ),
    "soft cap": (
        "gemma2",
        lambda visibility, scale, _softcap, window, sinks: (visibility, scale, None, window, sinks),
        "the model family gemma2 has soft-capped attention scores, which packed rows of it ignore",
    ),
    "scale": (
        "llama",
        lambda visibility, scale, *rest: (visibility, scale * 1.1, *rest),
        "log-probabilities of layout `shared` differ from the model's original forward",
    ),
    "leak": ("llama", everything_is_one_segment, "log-probabilities of layout `shared` differ"),
}


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(("family", "change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_attention_is_caught(family, change, message, monkeypatch):
    monkeypatch.setattr(interface, "segment_attention", attention_that(change))
    assert what_packed_rows_lack(FAMILIES[family]).startswith(message)
    with pytest.raises(UserError, match=r"layout shared is not possible: .*; use layout=auto or layout=padded"):
        choose_layout("shared", [FAMILIES[family]], None, 0, probe=what_packed_rows_lack)


@pytest.mark.usefixtures("forgetful")
def test_what_was_found_is_remembered_until_the_code_changes(monkeypatch, reference_cache):
    config, calls = FAMILIES["llama"], []
    original = probe._probe
    monkeypatch.setattr(probe, "_probe", lambda small: calls.append(small) or original(small))
    assert what_packed_rows_lack(config) is None
    (record,) = (reference_cache / DIRECTORY_NAME).iterdir()

    def ask_another_process() -> int:
        monkeypatch.setattr(probe, "_found", {})
        before = len(calls)
        assert what_packed_rows_lack(config) is None
        return len(calls) - before

    assert ask_another_process() == 0
    for damaged in ("", "[]", json.dumps(json.loads(record.read_text()) | {"key": "of another config"})):
        Path(record).write_text(damaged)
        assert ask_another_process() == 1
    monkeypatch.setattr(probe, "_code_digest", lambda: "changed")
    assert ask_another_process() == 1


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("name", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"])
def test_state_that_leaks_is_caught(name, monkeypatch):
    """Each function in turn goes on from one sequence to the next."""
    family = "nemotron_h" if name.startswith("mamba2") else "qwen3_5_text"

    def one_sequence(original, _visibility, *args, **rest):
        return original(*args, **rest)

    monkeypatch.setitem(branching_state._BRANCHED, name, one_sequence)
    assert what_packed_rows_lack(STATEFUL[family]).startswith("log-probabilities of layout `shared` differ")


@pytest.mark.parametrize(("family", "package", "name"), KERNELS)
def test_installed_kernels_do_not_switch_the_probe_off(family, package, name, monkeypatch, compared):
    """transformers binds them when it is imported, and they refuse a CPU."""
    kernel = bind_kernel(monkeypatch, STATEFUL[family], package, name)
    assert what_packed_rows_lack(STATEFUL[family]) is None
    (model,) = compared
    assert vars(sys.modules[type(model).__module__])[name] is kernel  # which the run's own model calls


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_args, **_settings):
        raise error

    return fail


@pytest.mark.usefixtures("forgetful")
def test_a_probe_that_fails_proves_nothing_and_is_tried_again_in_another_process(monkeypatch, caplog, reference_cache):
    monkeypatch.setattr(probe, "build_tiny_model", failing(RuntimeError("no such size")))
    for _ in range(2):
        assert what_packed_rows_lack(FAMILIES["llama"]) is None
    (record,) = [record for record in caplog.records if record.name == probe.__name__]
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "packed rows of the model family llama are not proven, because the start-up probe failed with RuntimeError: no "
        "such size; the run compares two of its pairs with the model's own forward. Set layout=padded to do without "
        "packed rows"
    )
    assert not (reference_cache / DIRECTORY_NAME).exists()


@pytest.mark.usefixtures("forgetful")
def test_a_window_that_cannot_be_probed_is_not_trusted(monkeypatch):
    """Real pairs may be shorter than it."""
    monkeypatch.setattr(probe, "build_tiny_model", failing(RuntimeError("no such size")))
    layout, note = choose_layout("auto", [FAMILIES["mistral"]], None, 0, probe=what_packed_rows_lack)
    assert (layout.name, note) == (
        "padded",
        "using layout padded: the model family mistral has a sliding window, which may differ in packed rows: the "
        "start-up probe failed with RuntimeError: no such size",
    )


@pytest.mark.usefixtures("forgetful")
def test_memory_that_is_lacking_is_no_verdict(monkeypatch, caplog, reference_cache):
    """torch raises it within packed rows, as any other RuntimeError."""
    lacking = RuntimeError("DefaultCPUAllocator: not enough memory")
    monkeypatch.setattr(interface, "segment_attention", failing(lacking))
    assert what_packed_rows_lack(FAMILIES["llama"]) is None
    assert "not proven, because the start-up probe failed with RuntimeError: DefaultCPUAllocator" in caplog.text
    assert not (reference_cache / DIRECTORY_NAME).exists()


def test_code_of_a_model_repository_is_not_probed_as_that_of_transformers(tmp_path, caplog, compared):
    config = copy.deepcopy(FAMILIES["llama"])
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config.save_pretrained(tmp_path)
    assert what_packed_rows_lack(load_model_config(str(tmp_path), trust_remote_code=True)) is None
    assert "not proven, because the run executes the code of the model's repository" in caplog.text
    assert not compared
    # not trusted: the run uses transformers' class
    assert what_packed_rows_lack(load_model_config(str(tmp_path))) is None
    assert len(compared) == 1


def test_the_shrunken_config_has_one_layer_of_each_kind_and_a_short_reach():
    small = shrink(default_config("gpt_oss"))
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.sliding_window, small.head_dim, small.num_attention_heads, small.num_key_value_heads) == (4, 64, 4, 2)
    text = shrink(default_config("gemma4")).get_text_config()
    assert text.num_hidden_layers == len(text.layer_types) <= 4
    assert text.sliding_window == 4
    # one size of a family is probed like any other
    assert shrink(default_config("llama")).to_dict() == shrink(FAMILIES["llama"].__class__(head_dim=128)).to_dict()
