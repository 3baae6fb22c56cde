"""Build the Megatron-Core engine: this process's model chunks, their adapters and their optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedConfig, PreTrainedModel

from thresher.engines.engine import Engine, TrainEngine
from thresher.engines.megatron.declaration import MegatronSettings
from thresher.engines.megatron.lora import Adapters, check_adapters, list_adapters
from thresher.engines.megatron.model import MegatronPairModel
from thresher.engines.megatron.parallel import create_groups
from thresher.engines.megatron.parameters import MegatronCheckpoint, ParameterState, PolicyOptimizer, wrap_chunks
from thresher.engines.megatron.schedule import ScheduleExecutor
from thresher.engines.megatron.transformer_config import describe_model, transformer_config
from thresher.engines.megatron.weights import PiecesOf, open_weights, read_pieces
from thresher.engines.nonfinite import LossScale
from thresher.engines.spec import ModelSpec
from thresher.errors import UserError
from thresher.models.loading.adapters import AdapterFiles, attach_adapter, initial_values
from thresher.models.optimizations.recompute import Recompute


def build_train(spec: ModelSpec[MegatronSettings]) -> TrainEngine:
    """Load the policy, attach adapters if it has any, and build its optimizer."""
    chunks = _load_chunks(spec, spec.training.gradient_checkpointing)
    model = spec.empty()
    module = spec.trained.apply(model)
    adapters = None
    if spec.trained.has_adapter:
        adapters = _attach_adapters(chunks, model, module, spec.trained.adapter, spec.seed)
    pieces = _freeze(chunks, model) if adapters is None else adapters.pieces
    wrapped = wrap_chunks(chunks, spec.settings)
    optimizer = PolicyOptimizer(wrapped, spec.training, spec.compute_dtype, pieces)
    first, dp_group = chunks[0], chunks[0].groups.dp
    if adapters is None and spec.compute_dtype != torch.float32:
        ties_embeddings = first.weight_map.ties_embeddings
        load_masters(optimizer.states, spec.path, ties_embeddings=ties_embeddings)
    return TrainEngine(
        model=nn.ModuleList(chunks),
        executor=ScheduleExecutor(chunks, wrapped, spec.layout),
        # a rank that reduces its gradients in a backward needs one
        dp_group=replace(dp_group, needs_lockstep=dp_group.needs_lockstep or spec.settings.overlap_grad_reduce),
        device=first.device,
        hidden_size=int(first.config.hidden_size),
        parameters=optimizer,
        checkpoint=MegatronCheckpoint(optimizer.states, dp_group.world),
        training=spec.training,
        adapter_disabled=nullcontext if adapters is None else adapters.disabled,
        scaler=LossScale.of(spec.training, spec.compute_dtype),
    )


def build_infer(spec: ModelSpec[MegatronSettings]) -> Engine:
    """Load a frozen model along the parallel dimensions of the settings."""
    chunks = _load_chunks(spec)
    if spec.adapter is not None:
        model = spec.empty()
        _attach_adapters(chunks, model, attach_adapter(model, spec.adapter), spec.adapter, seed=0)
    executor, first = ScheduleExecutor(chunks, chunks, spec.layout), chunks[0]
    frozen = nn.ModuleList(chunks).requires_grad_(False).eval()
    return Engine(frozen, executor, first.groups.dp, first.device, int(first.config.hidden_size))


def _load_chunks(spec: ModelSpec[MegatronSettings], recompute: Recompute = "off") -> list[MegatronPairModel]:
    """Build this process's chunks and read their slices of the weights."""
    try:
        torch.cuda.current_device()  # Megatron-Core allocates on it, wherever the model is
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA, or a process without a GPU
        raise UserError(
            f"Megatron-Core needs a GPU per worker, and a worker is on {spec.device} ({error}); set "
            "device_mapping, or strategy_name to fsdp2_train, which also runs on CPUs"
        ) from error
    if not dist.is_initialized():  # a single worker has no process group, and Megatron-Core needs one
        backend = "cpu:gloo,cuda:nccl" if spec.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        chunks = build_chunks(spec.model_config, spec.path, spec.settings, recompute, spec.compute_dtype, spec.device)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"Megatron-Core rejects the settings of strategy_config: {error}; change or remove the setting"
        ) from error
    load_weights(chunks, spec.path)
    return chunks


def build_chunks(
    config: PreTrainedConfig,
    path: str,
    settings: MegatronSettings,
    recompute: Recompute,
    dtype: torch.dtype,
    device: torch.device,
) -> list[MegatronPairModel]:
    """Build this process's chunks, one per virtual pipeline stage, without weights."""
    shape, groups = describe_model(config, path), create_groups(settings.sizes)
    return [
        MegatronPairModel(
            config, shape, groups, transformer_config(config, shape, settings, recompute, dtype, device), device, index
        )
        for index in range(settings.sizes.virtual_pp)
    ]


@torch.no_grad()
def _attach_adapters(
    chunks: list[MegatronPairModel],
    model: PreTrainedModel,
    peft_model: nn.Module,
    files: AdapterFiles | None,
    seed: int,
) -> Adapters:
    """Attach the adapters that PEFT has attached to a model on the meta device, and set their values."""
    found = list_adapters(peft_model)
    check_adapters(found, chunks)
    names = [name for name, _ in model.named_parameters() if ".lora_" in name]
    stored = None if files is None else files.tensors(names)
    adapters = Adapters(chunks, found)
    for parameter, pieces_of in adapters.pieces.items():
        for piece in pieces_of(parameter.data):
            hf_name = piece.hf_name.removeprefix("base_model.model.")
            values = initial_values(hf_name, piece.hf_shape, seed) if stored is None else stored[hf_name]
            piece.copy_(values[piece.slices])
    return adapters


def _freeze(chunks: list[MegatronPairModel], model: PreTrainedModel) -> dict[nn.Parameter, PiecesOf]:
    """Freeze the parameters whose counterparts in a model on the meta device are frozen; map the others to these."""
    is_trained = {name: each.requires_grad for name, each in model.named_parameters()}
    pieces: dict[nn.Parameter, PiecesOf] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            names = [piece.hf_name for piece in chunk.weight_map.pieces(name, parameter.detach())]
            trained = {is_trained[each] for each in names}
            if len(trained) > 1:
                raise UserError(
                    f"freeze_module_prefix freezes a part of {', '.join(names)}, which are one matrix in "
                    "Megatron-Core; freeze all of them or none"
                )
            parameter.requires_grad_(trained != {False})
            if parameter.requires_grad:
                pieces[parameter] = partial(chunk.weight_map.pieces, name)
    return pieces


@torch.no_grad()
def load_weights(chunks: Iterable[MegatronPairModel], path: str) -> None:
    """Fill every parameter of the model chunks of this process."""
    for chunk in chunks:
        reader = open_weights(path, ties_embeddings=chunk.weight_map.ties_embeddings)
        for name, parameter in chunk.named_parameters():
            parameter.zero_()  # the padding of the vocabulary
            read_pieces(reader, chunk.weight_map.pieces(name, parameter.data))


@torch.no_grad()
def load_masters(states: Iterable[ParameterState], path: str, *, ties_embeddings: bool) -> None:
    """Fill the fp32 weights of an optimizer, which it has copied from 16-bit parameters."""
    reader = open_weights(path, ties_embeddings=ties_embeddings)
    for state in states:
        weight = torch.zeros(state.parameter.shape)
        read_pieces(reader, state.pieces(weight))
        state.assign(weight, {}, None)
