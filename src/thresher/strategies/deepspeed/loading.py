"""Load the model of an engine; for ZeRO-3, parameters are read and partitioned one module at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from thresher.models.loading.load_sharded import load_modules, move_buffers, stores_every_parameter
from thresher.strategies.spec import ModelSource
from thresher.strategies.strategy import ParameterCounts


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with what partitioning hides: shapes and counts of whole parameters, by name."""

    causal_lm: nn.Module
    shapes: dict[str, tuple[int, ...]]
    counts: ParameterCounts

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.causal_lm.named_parameters() if p.requires_grad}


def load_model(
    source: ModelSource,
    prepare: Callable[[PreTrainedModel], nn.Module],
    init_adapters: Callable[[PreTrainedModel], None],
    device: torch.device,
    partition: Callable[[nn.Module], None] | None,
) -> LoadedModel:
    """Load a model; partition: called with each module whose parameters are there, None keeps them whole.

    prepare: adds adapters and freezes parameters. init_adapters: sets the values of new adapters.
    """
    by_module = partition is not None
    model = source.empty() if by_module else source.load()
    if by_module and not stores_every_parameter(model, source.named_path):
        # transformers converts the whole model; DeepSpeed partitions it from host memory when the engine starts
        model, by_module = source.load(), False
    causal_lm = prepare(model)
    shapes = {name: tuple(p.shape) for name, p in causal_lm.named_parameters()}
    counts = ParameterCounts.of(causal_lm)
    if partition is None:
        causal_lm.to(device)
        init_adapters(model)
    elif not by_module:
        move_buffers(model, device)
        init_adapters(model)
    else:
        for name, module in model.named_modules():
            if ".lora_" in f".{name}":
                module.to_empty(device=device, recurse=False)
        init_adapters(model)
        load_modules(model, source.named_path, device, partition)
    return LoadedModel(causal_lm, shapes, counts)


def partitioner(deepspeed: Any, config: dict[str, Any]) -> Callable[[nn.Module], None]:
    """Return a function that keeps this process's part of a module's parameters, for ZeRO-3."""

    def partition(module: nn.Module) -> None:
        deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=torch.float32)

    return partition


def gather_experts_together(deepspeed: Any, model: LoadedModel) -> None:
    """Let ZeRO-3 take the experts of a layer for one module; before the engine is created.

    ZeRO-3 requires that all ranks call the same modules in the same order. The experts of transformers are in stacked
    matrices, and call their activation once for each expert that tokens of the micro-batch are routed to.
    """
    for name, shape in model.shapes.items():
        if len(shape) == 3:
            deepspeed.utils.set_z3_leaf_module(model.causal_lm.get_submodule(name.rpartition(".")[0]), True)
