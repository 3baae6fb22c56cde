"""One rank of a simulated run: the code of training builds the policy and makes steps, on fake tensors.

Weights and adapters are allocated and never read. Imported after __main__.py has changed torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from thresher.builders.engines import model_spec
from thresher.builders.inputs import find_layout
from thresher.builders.objective import build_objective
from thresher.config import parse_config
from thresher.data.example import Example, ExampleBatch, Response
from thresher.distributed import expert_parallel
from thresher.distributed.groups import Group
from thresher.distributed.mesh import MESH_DIMS, ParallelDims
from thresher.distributed.tensors import copy_to_device
from thresher.engines.accumulate import MicroBatch
from thresher.engines.native.build import axis_sizes, build_infer, build_train
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.spec import ModelSpec
from thresher.losses.pairs import ExampleLogps, ResponseLogps
from thresher.models.attention.interface import KERNELS
from thresher.models.layouts import Layout
from thresher.models.loading.load_sharded import allocate, build_without_weights
from thresher.models.loading.trained import TrainedParts
from thresher.models.logps import base_model
from thresher.observability.machine import peak_rss_bytes
from thresher.plan.simulate.counters import (
    Collective,
    CommunicationCounter,
    HostSide,
    LiveBytes,
    OperationCounter,
    leave_shapes_uncounted,
)
from thresher.plan.simulate.request import CountedCollective, CountedDim, Kind, RankRequest, RankResult

# one token id for all tokens: no value is ever computed
_TOKEN = 3


def run_rank(request: RankRequest) -> RankResult:
    """Build the policy of a rank, make a step that allocates its optimizer state, and count a second one."""
    started = time.process_time()
    device = torch.device("cuda", 0)
    dist.init_process_group("fake", store=FakeStore(), rank=request.rank, world_size=request.num_processes)
    KERNELS["cuda"] = attention_without_values
    expert_parallel.read_sizes = balanced_sizes
    leave_shapes_uncounted()
    layout = find_layout(parse_config(request.config))[1]  # before the mode: its probe compares values
    live, host = LiveBytes(device.type), HostSide()
    counted, communication = OperationCounter(device.type), CommunicationCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        with host:
            step = _Step(request, device, layout)
            step.run(1)
        held = live.peak = live.live
        host.reads.clear()
        with communication, counted, host:  # the host's side sees an operation first
            step.run(len(request.micro_batches))
    return RankResult(
        request.rank,
        held,
        live.peak,
        _counted(communication, request, step.settings),
        dict(host.reads),
        dict(counted.flops),
        counted.operations,
        time.process_time() - started,
        peak_rss_bytes(),
    )


class _Step:
    """The policy of a rank, its reference, and the steps that it makes."""

    def __init__(self, request: RankRequest, device: torch.device, layout: Layout):
        config, world = parse_config(request.config), Group(request.rank, request.num_processes, dist.group.WORLD)

        def spec_of(section: Literal["actor_train", "reference"]) -> ModelSpec[FSDP2Settings]:
            values = vars(model_spec(config, section, config.actor_train, lambda: layout, device, world))
            trained = TrainedPartsWithoutValues(**vars(values["trained"]))
            # uncompiled: a compiler needs values
            return SpecWithoutValues(**values | {"trained": trained, "compilation": None})

        self._policy = build_train(spec_of("actor_train"))
        self._score: Callable[[ExampleBatch], ExampleLogps] | None = None
        if request.reference == "adapter":
            self._score = self._policy.score_base
        elif request.reference == "copy":
            self._score = build_infer(spec_of("reference")).score
        self.settings: FSDP2Settings = config.actor_train.strategy_args.settings
        self._request, self._device = request, device
        self._batches = [_batch(lengths) for lengths in request.micro_batches]
        has_one_response = all(batch.num_sides == 1 for batch in self._batches)
        self._objective = replace(build_objective(config), reads_labels=has_one_response)
        # as the check of the logps at the start of a run: FSDP2 prepares itself in the first forward, which must find
        # the adapters on
        self._policy.score(self._batches[0])

    def run(self, num_micro_batches: int) -> None:
        """Make a step, with the reference scored first if these processes do it."""
        self._policy.train_step(
            [MicroBatch(batch, self._reference(batch)) for batch in self._batches[:num_micro_batches]],
            self._objective,
            num_pairs_in_step=self._request.pairs_per_step,
            learning_rate=1e-6,
        )

    def _reference(self, batch: ExampleBatch) -> ExampleLogps | None:
        if not self._objective.needs_reference:
            return None
        if self._score is not None:
            return self._score(batch)

        def side(sizes: list[int]) -> ResponseLogps:
            return ResponseLogps(
                copy_to_device(torch.zeros(sum(sizes)), self._device),
                copy_to_device(torch.tensor(sizes), self._device),
            )

        sizes = [[len(response.ids) for response in pair.responses] for pair in batch.pairs]
        by_side = ([each[number] for each in sizes if number < len(each)] for number in range(batch.num_sides))
        return ExampleLogps(tuple(map(side, by_side)))


def _batch(lengths: list[list[int]]) -> ExampleBatch:
    def ids(size: int) -> npt.NDArray[np.int32]:
        return np.full(size, _TOKEN, dtype=np.int32)

    pairs = tuple(Example(ids(prompt), tuple(Response(ids(n)) for n in sizes if n)) for prompt, *sizes in lengths)
    return ExampleBatch(np.arange(len(pairs)), pairs)


def _counted(
    communication: CommunicationCounter, request: RankRequest, settings: FSDP2Settings
) -> list[CountedCollective]:
    dims = axis_sizes(settings, request.num_processes)
    found: dict[tuple[CountedDim, Kind, int, bool], CountedCollective] = {}
    for each, payload in communication.payloads.items():
        on_host, size, calls = each.device == "cpu", len(each.ranks), communication.calls_of[each]
        is_of_step = on_host or each.is_of_numbers
        mesh_dim: CountedDim = "step" if is_of_step else mesh_dim_of(each, dims, request.rank)
        key = mesh_dim, each.kind, size, on_host
        before = found.get(key, CountedCollective(mesh_dim, each.kind, size, 0, 0, on_host))
        found[key] = replace(before, calls=before.calls + calls, payload=before.payload + payload)
    return list(found.values())


def mesh_dim_of(collective: Collective, dims: ParallelDims, rank: int) -> CountedDim:
    """The mesh dimension whose processes exchange device data in a collective."""
    kind, ranks = collective.kind, collective.ranks
    if kind == "all_to_all":
        return "cp" if collective.is_functional else "ep"
    if kind in ("send", "receive", "broadcast"):
        return "pp"
    if kind in ("all_gather", "reduce_scatter") and not collective.is_functional:
        return "dp_shard"  # of FSDP2, over dp_shard and cp or what ep leaves of them
    mesh = np.arange(dims.num_processes).reshape(dims.sizes)
    own = np.argwhere(mesh == rank)[0]
    for number, mesh_dim in enumerate(MESH_DIMS):
        index = tuple(slice(None) if each == number else at for each, at in enumerate(own))
        if set(ranks) <= set(mesh[index].tolist()):
            return cast("CountedDim", mesh_dim)
    raise ValueError(f"a {kind} of the ranks {ranks} is along no mesh dimension")


class SpecWithoutValues(ModelSpec[FSDP2Settings]):
    """The model of a path by its config alone."""

    def load(self) -> PreTrainedModel:
        return self.empty()

    def empty_to_share(self) -> None:
        return None

    def move(self, module: nn.Module) -> nn.Module:
        allocate(base_model(module), self.device)  # `Module.to` copies values, and there are none
        return module

    def empty(self) -> PreTrainedModel:
        # plain tensors on the meta device: a module cannot replace parameters that are fake already
        with _disable_current_modes():
            return build_without_weights(self.path, **self._load_settings, quantization=self.quantization)

    @property
    def shards_path(self) -> None:
        return None


class TrainedPartsWithoutValues(TrainedParts):
    """The trained part of such a model."""

    def apply(self, model: PreTrainedModel, frozen_dtype: torch.dtype | None = None) -> nn.Module:
        with _disable_current_modes():
            return super().apply(model, frozen_dtype)


def balanced_sizes(by_process: Tensor, by_slot: Tensor) -> tuple[list[int], list[int]]:
    """Stand in for the sizes of messages between experts: every process has as many rows."""
    by_process.sum().item()  # the host waits
    size = by_process.shape[1]
    sizes = [(len(by_slot) + rank) // size for rank in range(size)]
    return sizes, sizes


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


# one operation, whose results selective recomputation keeps
_LIBRARY = torch.library.Library("thresher", "FRAGMENT")
_LIBRARY.define("attention_without_values(Tensor query, Tensor value) -> (Tensor, Tensor)")
_LIBRARY.impl("attention_without_values", _outputs, "CompositeExplicitAutograd")


class _Attention(torch.autograd.Function):
    """FlexAttention keeps its inputs, its output and the fp32 log-sum-exp of each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor
        out, log_sums = torch.ops.thresher.attention_without_values(query, value)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, log_sums = ctx.saved_tensors
        torch.empty_like(log_sums)  # sums over the products of outputs and their gradients
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attention_without_values(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Tensor:
    """Stand in for the attention kernel of GPUs."""
    out: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    *_, sinks = settings
    return out if sinks is None else (out * torch.sigmoid(sinks.float())[:, None, None]).to(out.dtype)
