"""Build the models of the megatron strategies: the chunks of this process, their adapters and their optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedModel

from thresher.errors import UserError
from thresher.models.loading.adapters import AdapterFiles, attach_adapter, initial_values
from thresher.models.optimizations.recompute import Recompute
from thresher.strategies.megatron.checkpoint import NamedState
from thresher.strategies.megatron.declaration import MegatronSettings
from thresher.strategies.megatron.infer import MegatronInfer
from thresher.strategies.megatron.load_weights import load_masters, load_weights
from thresher.strategies.megatron.lora import ChunkAdapters, check_adapters, list_adapters
from thresher.strategies.megatron.model import MegatronPairModel, build_chunks
from thresher.strategies.megatron.optimizer import PolicyOptimizer, wrap_chunks
from thresher.strategies.megatron.parallel import create_groups
from thresher.strategies.megatron.parameter_state import ParameterState
from thresher.strategies.megatron.train import MegatronTrain
from thresher.strategies.megatron.transformer_config import RECOMPUTABLE, ModelOptions, describe_model
from thresher.strategies.megatron.weights import Piece
from thresher.strategies.spec import ModelSpec, PolicySpec
from thresher.strategies.strategy import ParameterCounts


def build_train(spec: PolicySpec) -> MegatronTrain:
    """Load the policy, attach adapters if it has any, and build its optimizer."""
    settings: MegatronSettings = spec.settings
    chunks = _build_chunks(spec, spec.gradient_checkpointing)
    model = spec.source.empty()
    module = spec.trained.apply(model)
    adapters: list[ChunkAdapters] = []
    if spec.trained.has_adapter:
        adapters = _attach_adapters(chunks, model, module, spec.trained.adapter, spec.seed)
    else:
        _freeze(chunks, model)
    wrapped = wrap_chunks(
        chunks,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
    )
    optimizer = PolicyOptimizer(wrapped, spec.optimizer, spec.compute_dtype)
    states = _named_states(optimizer, chunks, adapters)
    if not adapters and spec.compute_dtype != torch.float32:
        load_masters(chunks, spec.source.named_path, [each.state for each in states])
    return MegatronTrain(
        chunks,
        optimizer,
        spec.optimizer,
        states,
        spec.layout,
        ParameterCounts.of(module),
        adapters,
    )


def build_infer(spec: ModelSpec) -> MegatronInfer:
    """Load a frozen model along the axes of the settings."""
    chunks = _build_chunks(spec)
    if spec.adapter is not None:
        model = spec.source.empty()
        _attach_adapters(chunks, model, attach_adapter(model, spec.adapter), spec.adapter, seed=0)
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return MegatronInfer(chunks, spec.layout)


def _build_chunks(spec: ModelSpec, recompute: Recompute = "off") -> list[MegatronPairModel]:
    """Build the chunks of this process and read their slices of the weights."""
    _check_gpu(spec.device)
    if not dist.is_initialized():  # a single worker has no process group, and Megatron-Core needs one
        backend = "cpu:gloo,cuda:nccl" if spec.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    config, path = spec.source.config(), spec.source.named_path
    options = model_options(spec.settings, spec.device, recompute)
    groups = create_groups(spec.settings.sizes)
    try:
        chunks = build_chunks(config, describe_model(config, path), groups, options, spec.compute_dtype, spec.device)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"Megatron-Core rejects the settings of strategy_config: {error}; change or remove the setting"
        ) from error
    load_weights(chunks, path)
    return chunks


def _check_gpu(device: torch.device) -> None:
    """Raise without a GPU: Megatron-Core allocates on the current CUDA device, wherever the model is."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA, or a process without a GPU
        raise UserError(
            f"the megatron strategies need a GPU per worker, and a worker is on {device} ({error}); set "
            "device_mapping, or strategy_name to fsdp2_train, which also runs on CPUs"
        ) from error


def model_options(settings: MegatronSettings, device: torch.device, recompute: Recompute) -> ModelOptions:
    """Translate the settings that change how Megatron-Core computes a model; its own ones win over `recompute`."""
    granularity = settings.recompute_granularity or (None if recompute == "off" else recompute)
    is_full, on_gpu = granularity == "full", device.type == "cuda"
    extra: dict[str, Any] = {
        "moe_token_dispatcher_type": settings.moe_token_dispatcher_type,
        "bias_activation_fusion": settings.bias_activation_fusion and on_gpu,
        "moe_permute_fusion": settings.moe_permute_fusion and on_gpu and find_spec("transformer_engine") is not None,
    }
    if settings.sizes.virtual_pp > 1:
        # one message per direction: with 2 stages, the next one is also the previous one, and a batch would mix them up
        extra |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    modules = settings.recompute_modules
    if modules is None and settings.recompute_granularity is None and recompute == "selective":
        modules = ["layernorm"]  # the default of Megatron-Core computes attention again
    return ModelOptions(
        recompute_granularity=granularity,
        recompute_method=(settings.recompute_method or "uniform") if is_full else None,
        recompute_num_layers=(settings.recompute_num_layers or 1) if is_full else None,
        recompute_modules=None if modules is None else tuple(name for name in modules if name in RECOMPUTABLE),
        extra=extra | settings.additional_configs,
    )


@torch.no_grad()
def _attach_adapters(
    chunks: list[MegatronPairModel],
    model: PreTrainedModel,
    peft_model: nn.Module,
    files: AdapterFiles | None,
    seed: int,
) -> list[ChunkAdapters]:
    """Attach the adapters that PEFT has attached to a model on the meta device, and set their values."""
    found = list_adapters(peft_model)
    check_adapters(found, chunks)
    names = [name for name, _ in model.named_parameters() if ".lora_" in name]
    stored = None if files is None else files.tensors(names)
    attached = []
    for chunk in chunks:
        adapters = ChunkAdapters(chunk, found)
        for name, parameter in chunk.named_parameters():
            for piece in adapters.pieces(name, parameter.data) if adapters.has(name) else ():
                hf_name = piece.hf_name.removeprefix("base_model.model.")
                values = initial_values(hf_name, piece.hf_shape, seed) if stored is None else stored[hf_name]
                piece.copy_(values[piece.slices])
        attached.append(adapters)
    return attached


def _freeze(chunks: list[MegatronPairModel], model: PreTrainedModel) -> None:
    """Freeze the parameters whose counterparts in a model on the meta device are frozen."""
    is_trained: Mapping[str, bool] = {name: each.requires_grad for name, each in model.named_parameters()}
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


def _named_states(
    optimizer: PolicyOptimizer, chunks: list[MegatronPairModel], adapters: list[ChunkAdapters]
) -> list[NamedState]:
    """Name the optimizer's state by transformers, and find the process that writes it."""
    states: dict[nn.Parameter, ParameterState] = {state.parameter: state for state in optimizer.states()}
    located = {
        parameter: (index, chunk, name)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    named = []
    for parameter, state in states.items():
        index, chunk, name = located[parameter]
        pieces_of = adapters[index].pieces if adapters else chunk.weight_map.pieces
        named.append(
            NamedState(state, partial(pieces_of, name), _is_owner(chunk, parameter, pieces_of(name, parameter)))
        )
    return named


def _is_owner(chunk: MegatronPairModel, parameter: Tensor, pieces: list[Piece]) -> bool:
    """Whether this process, of the tensor-parallel ranks and stages with the same values, writes them."""
    if getattr(parameter, "shared", False):  # the last stage has a copy of a tied embedding
        return False
    return chunk.groups.tp.rank == 0 or all(piece.axis is not None for piece in pieces)
