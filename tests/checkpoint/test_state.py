"""State round-trips bit for bit: tensors, weights, numbers, optimizers and random streams."""

from __future__ import annotations

import math
import os
import random
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thresher.checkpoint.json_io import decode, encode, load_json, save_json
from thresher.checkpoint.state import (
    STEM,
    State,
    capture_rng,
    load_optimizer_state,
    load_state,
    load_weights,
    merge_rng,
    optimizer_state,
    restore_rng,
    restore_rng_of_rank,
    save_state,
)
from thresher.checkpoint.tensor_files import load_tensors, save_tensors
from thresher.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
many_examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    left, right = left.contiguous().reshape(-1), right.contiguous().reshape(-1)
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    num_bytes = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone()
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


@many_examples
@given(tensors=st.dictionaries(st.text("abc./", min_size=1, max_size=6), any_tensor(), max_size=5))
def test_any_tensors_round_trip_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]
) -> None:
    directory = tmp_path_factory.mktemp("tensors")
    name = save_tensors(directory, "model", tensors)
    assert [name] == [path.name for path in directory.iterdir()]
    loaded = load_tensors(directory, "model")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(loaded[name], tensor)


def test_tied_tensors_are_written_once_and_tied_after_loading(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    name = save_tensors(tmp_path, "model", {"embed": weight, "head": weight, "other": torch.randn(8)})
    loaded = load_tensors(tmp_path, "model")
    assert loaded["head"] is loaded["embed"]
    assert_same_bits(loaded["head"], weight)
    assert (tmp_path / name).stat().st_size < 2 * weight.nbytes + 32 + 400


def test_overlapping_views_are_loaded_as_separate_copies(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    tensors = {"base": base, "flat": base.view(-1), "row": base[1], "transposed": base.T, "wide": base[:1].expand(4, 3)}
    save_tensors(tmp_path, "model", tensors)
    loaded = load_tensors(tmp_path, "model")
    for name, tensor in tensors.items():
        assert_same_bits(loaded[name], tensor)
    loaded["base"].zero_()
    assert loaded["row"].tolist() == [3.0, 4.0, 5.0]


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    weight = torch.randn(4)
    tensors = {"x": weight, "tied": weight, "y": torch.ones(2)}
    contents = set()
    for attempt in range(8):
        save_tensors(tmp_path, str(attempt), dict(random.sample(list(tensors.items()), 3)))
        contents.add((tmp_path / f"{attempt}.safetensors").read_bytes())
    assert len(contents) == 1


def test_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    save_tensors(tmp_path, "model", {"x": torch.ones(2)})
    save_json(tmp_path / "state.json", {})
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "state.json").stat().st_mode
    assert stat.S_ISREG((tmp_path / "model.safetensors").stat().st_mode)


class Bomb:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_in_place_of_a_file_is_rejected_and_not_executed(tmp_path: Path) -> None:
    torch.save(Bomb(tmp_path / "boom"), tmp_path / "model.safetensors")
    (tmp_path / "model.json").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_tensors(tmp_path, "model")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_json(tmp_path / "model.json")
    assert not (tmp_path / "boom").exists()


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_tensors(tmp_path, "model")
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        load_json(tmp_path / "state.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@many_examples
@given(value=json_values)
def test_any_json_value_round_trips_exactly(value: object) -> None:
    # repr distinguishes 1, 1.0 and True, as well as 0.0 and -0.0, and shows NaN
    assert repr(decode(encode(value))) == repr(value)


@many_examples
@given(value=st.floats())
def test_floats_round_trip_through_a_file(tmp_path: Path, value: float) -> None:
    save_json(tmp_path / "x.json", {"v": value})
    assert repr(load_json(tmp_path / "x.json")["v"]) == repr(value)


@pytest.mark.parametrize("value", [{1: 2}, {"$float": 1}, np.float64(1.0), {"x": {3}}, b"bytes"])
def test_values_that_json_would_change_are_rejected(value: object) -> None:
    with pytest.raises(TypeError, match="saved state"):
        encode(value)  # type: ignore[arg-type]


def make_mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def make_optimizer(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), **options)


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(6, 5, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_continues_bitwise_from_a_saved_optimizer(
    tmp_path: Path, options: dict[str, bool], dtype: torch.dtype
) -> None:
    uninterrupted = make_mlp(dtype)
    uninterrupted_optimizer = make_optimizer(uninterrupted, **options)
    train(uninterrupted, uninterrupted_optimizer, range(8))

    first = make_mlp(dtype)
    first_optimizer = make_optimizer(first, **options)
    train(first, first_optimizer, range(5))
    save_tensors(tmp_path, "model", first.state_dict())
    save_state(tmp_path, "optimizer", optimizer_state(first_optimizer, names_of(first)))

    second = make_mlp(dtype)
    second_optimizer = make_optimizer(second, **options)
    second.load_state_dict(load_tensors(tmp_path, "model"))
    load_optimizer_state(second_optimizer, names_of(second), load_state(tmp_path, "optimizer"))
    assert second_optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    train(second, second_optimizer, range(5, 8))

    for name, parameter in uninterrupted.named_parameters():
        assert_same_bits(dict(second.named_parameters())[name].detach(), parameter.detach())
    ours = optimizer_state(second_optimizer, names_of(second))
    theirs = optimizer_state(uninterrupted_optimizer, names_of(uninterrupted))
    assert ours.values == theirs.values
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert_same_bits(ours.tensors[name], tensor)


def test_fp32_moments_of_bf16_parameters_keep_their_bits(tmp_path: Path) -> None:
    model = make_mlp(torch.bfloat16)
    optimizer = make_optimizer(model)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.randn(parameter.shape)}
    state = optimizer_state(optimizer, names_of(model))
    save_state(tmp_path, "optimizer", state)
    other = make_optimizer(model)
    load_optimizer_state(other, names_of(model), load_state(tmp_path, "optimizer"))
    for parameter in model.parameters():
        assert_same_bits(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_parameters_without_state_have_none_after_loading(tmp_path: Path) -> None:
    model = make_mlp()
    optimizer = make_optimizer(model)
    used = next(model.parameters())
    used.grad = torch.ones_like(used)
    optimizer.step()
    save_state(tmp_path, "optimizer", optimizer_state(optimizer, names_of(model)))
    other = make_optimizer(model)
    train(model, other, range(1))  # gives every parameter state, which loading must remove
    load_optimizer_state(other, names_of(model), load_state(tmp_path, "optimizer"))
    assert list(other.state) == [used]


@pytest.mark.parametrize("option", [None, "fused", "capturable"])
def test_the_step_count_is_next_to_the_parameter_if_the_kernel_needs_it(option: str | None) -> None:
    """On a device other than the CPU, here `meta`."""
    model = make_mlp()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1))
    state = optimizer_state(optimizer, names_of(model))
    elsewhere = make_mlp().to("meta")
    loaded = make_optimizer(elsewhere)
    for group in loaded.param_groups:
        group.update({option: True} if option else {})
    load_optimizer_state(loaded, names_of(elsewhere), state)
    devices = {(key, value.device.type) for values in loaded.state.values() for key, value in values.items()}
    assert ("exp_avg", "meta") in devices
    assert {device for key, device in devices if key == "step"} == {"meta" if option else "cpu"}


def test_hyper_parameters_after_a_load_are_those_of_the_optimizer(tmp_path: Path) -> None:
    model = make_mlp()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    save_state(tmp_path, "optimizer", optimizer_state(optimizer, names_of(model)))
    changed = make_optimizer(model)
    for group in changed.param_groups:
        group.update(weight_decay=0.7, betas=(0.5, 0.6), eps=1e-4)
    load_optimizer_state(changed, names_of(model), load_state(tmp_path, "optimizer"))
    assert {(g["weight_decay"], g["betas"], g["eps"]) for g in changed.param_groups} == {(0.7, (0.5, 0.6), 1e-4)}
    assert changed.state


def test_state_of_another_model_or_optimizer_is_rejected_and_changes_nothing() -> None:
    model = make_mlp()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1))
    state = optimizer_state(optimizer, names_of(model))

    renamed = {parameter: f"base.{name}" for parameter, name in names_of(model).items()}
    with pytest.raises(CheckpointError, match=r"base\.0\.weight is not in the checkpoint.*same model"):
        load_optimizer_state(optimizer, renamed, state)
    wider = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    wider_optimizer = make_optimizer(wider)
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \[8, 5\].*\[9, 5\]"):
        load_optimizer_state(wider_optimizer, names_of(wider), state)
    assert not wider_optimizer.state
    with pytest.raises(CheckpointError, match="AdamW, this run uses SGD"):
        load_optimizer_state(torch.optim.SGD(model.parameters(), lr=1.0), names_of(model), state)
    with pytest.raises(CheckpointError, match="2 parameter groups, this run's has 1"):
        load_optimizer_state(torch.optim.AdamW(model.parameters()), names_of(model), state)
    with pytest.raises(CheckpointError, match="has no name"):
        optimizer_state(optimizer, {})


def draw_from_all() -> list[object]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]


def test_random_streams_continue_bitwise(tmp_path: Path) -> None:
    draw_from_all()  # an odd number of gaussians: each generator caches a spare one
    save_state(tmp_path, "rng", capture_rng())
    expected = [draw_from_all() for _ in range(5)]
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert restore_rng(load_state(tmp_path, "rng")) == []
    assert [draw_from_all() for _ in range(5)] == expected


def test_capturing_does_not_advance_the_streams() -> None:
    state = capture_rng()
    again = capture_rng()
    assert state.values == again.values
    assert all(torch.equal(state.tensors[name], again.tensors[name]) for name in state.tensors)


def test_a_changed_number_of_cuda_devices_is_reported() -> None:
    tensors, values = capture_rng()
    (message,) = restore_rng(State({**tensors}, {**values, "num_cuda_devices": torch.cuda.device_count() + 1}))
    assert "CUDA devices" in message


def test_every_rank_continues_its_random_stream(tmp_path):
    """Two ranks are saved; a third, which the checkpoint does not have, keeps its stream."""
    states, expected = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(capture_rng())
        expected.append(torch.rand(3))
    save_state(tmp_path, "rng", merge_rng(states))
    merged = load_state(tmp_path, "rng")
    for rank in (0, 1):
        torch.manual_seed(9)
        assert restore_rng_of_rank(merged, rank, 2) == []
        assert torch.equal(torch.rand(3), expected[rank])
    torch.manual_seed(9)
    fresh = torch.rand(3)
    torch.manual_seed(9)
    assert restore_rng_of_rank(merged, 2, 3) == []
    assert torch.equal(torch.rand(3), fresh)
    assert restore_rng_of_rank(merged, 0, 3) == [
        "the checkpoint has the RNG state of 2 ranks, and this run has 3: ranks from 2 on start new streams"
    ]
    assert restore_rng_of_rank(merge_rng(states[:1]), 0, 1) == []


def parameters(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    values = {"a": torch.zeros(2, 3), "b": torch.zeros(4)} | changes
    return {name: torch.nn.Parameter(value) for name, value in values.items() if value is not None}


def test_weights_are_loaded_bitwise(tmp_path):
    stored = {"a": torch.randn(2, 3), "b": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])}
    save_tensors(tmp_path, STEM, stored)
    loaded = parameters()
    load_weights(tmp_path, loaded, hint="unused")
    for name, tensor in stored.items():
        assert torch.equal(loaded[name].detach().view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(
    "changes",
    [
        {"b": None},
        {"c": torch.zeros(1)},
        {"b": torch.zeros(5)},
        {"b": torch.zeros(1)},  # a copy would broadcast
        {"b": torch.zeros(4, dtype=torch.bfloat16)},
    ],
    ids=["one less", "one more", "longer", "broadcast", "rounded"],
)
def test_another_name_shape_or_dtype_is_rejected_and_nothing_is_copied(tmp_path, changes):
    save_tensors(tmp_path, STEM, {"a": torch.ones(2, 3), "b": torch.ones(4)})
    loaded = parameters(**changes)
    message = r"was made for a different model: 1 weights differ, such as [bc]; do this$"
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path, loaded, hint="do this")
    assert not any(parameter.any() for parameter in loaded.values())
