"""Trained parameters under Megatron-Core: its gradient buffers and AdamW, and their checkpoint files.

The loss is already divided by the pairs of the whole step (see accumulate.py), so every reduction is a plain sum. With
`calculate_per_token_loss` Megatron-Core scales nothing by the number of ranks or micro-batches:

    dimension gradients                                    summed by
    dp        all except experts'                          DistributedDataParallel
    dp / ep   of experts, which see the tokens of ep       DistributedDataParallel
    tp        of replicated parameters with partial sums   finalize_model_grads (norms within heads, sequence parallel)
    pp        of an embedding tied to the head             finalize_model_grads

The files are the same as the native engine's: slices of the tensors of transformers, weights in fp32, and the moments
by the same names. Any engine and any mesh can load them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn

from thresher.checkpoint.state import STEM, check_groups, check_specs, join_values
from thresher.checkpoint.tensor_files import Shard, ShardedReader, TensorShard
from thresher.config.roles import TrainingArgs
from thresher.distributed.groups import Group
from thresher.engines.megatron.declaration import MegatronSettings
from thresher.engines.megatron.weights import PiecesOf
from thresher.engines.policy_files import ADAMW, OPTIMIZER, RESUME_HINT, adamw_groups, adamw_values

_WEIGHT, _STEP = "weight", "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NOT_DECAYED = ParamKey(predicate=ParamPredicate(name="ndim < 2", fn=lambda parameter: parameter.ndim < 2))


def wrap_chunks(chunks: Sequence[nn.Module], settings: MegatronSettings) -> list[DistributedDataParallel]:
    """Give the trained parameters of every chunk of the model a gradient buffer; gradients are summed in fp32."""
    options = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": settings.use_distributed_optimizer,
        "overlap_grad_reduce": settings.overlap_grad_reduce,
        "overlap_param_gather": settings.overlap_param_gather,
    }
    config: Any = chunks[0].config
    wrapped = [
        # buckets of later chunks do not overlap with anything
        DistributedDataParallel(config, DistributedDataParallelConfig(**options), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if settings.overlap_grad_reduce:
        # the backward of the last micro-batch reduces the gradients
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync[0] if len(wrapped) == 1 else no_sync
    return wrapped


class PolicyOptimizer:
    """AdamW over the trained parameters of this process, or over its share of them among data-parallel ranks."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        training: TrainingArgs,
        compute_dtype: torch.dtype,
        pieces: Mapping[nn.Parameter, PiecesOf],
    ):
        self.chunks = list(chunks)
        ddp = self.chunks[0].ddp_config
        config = OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            adam_eps=training.adam_epsilon,
            clip_grad=training.max_grad_norm,
            # 16-bit parameters get fp32 copies, which the optimizer updates; fp16 would bring Megatron's loss scale
            bf16=compute_dtype != torch.float32,
            params_dtype=compute_dtype,
            use_distributed_optimizer=ddp.use_distributed_optimizer,
            overlap_param_gather=ddp.overlap_param_gather,
            log_num_zeros_in_grad=training.log_num_zeros_in_grad,
        )
        self._optimizer = get_megatron_optimizer(
            config, self.chunks, {_NOT_DECAYED: {"wd_mult": 0.0}}, use_gloo_process_groups=False
        )
        for group in self._optimizer.param_groups:
            # Megatron's scheduler, which is not used, would multiply them in every step
            group["weight_decay"] = training.weight_decay * group["wd_mult"]
        # the state of every trained parameter of this process; collective
        self.states = [
            state
            for each in self._optimizer.chained_optimizers
            if not each.is_stub_optimizer
            for state in _parameter_states(each, self.chunks, pieces)
        ]

    def reduce_gradients(self) -> None:
        finalize_model_grads(self.chunks)
        self._optimizer.prepare_grads()

    def count_zeros(self) -> float:
        return self._once(float(self._optimizer.count_zeros()))

    def squared_norm(self) -> float:
        return self._once(float(self._optimizer.get_grad_norm()) ** 2)

    def scale(self, factor: float) -> None:
        gradients = [p.grad for each in self._optimizer.chained_optimizers for p in each.get_parameters()]
        if gradients := [gradient for gradient in gradients if gradient is not None]:
            torch._foreach_mul_(gradients, factor)

    def _once(self, total: float) -> float:
        """A number that Megatron-Core has summed over all processes, as the share of one of them."""
        return total if dist.get_rank() == 0 else 0.0

    def update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step_with_ready_grads()

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """This process's slices of the trained weights, by the names of transformers; collective."""
        if self.chunks[0].ddp_config.overlap_param_gather:  # a step leaves the gathering to the next forward
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return {
            piece.hf_name: piece.values() for state in self.states for piece in state.pieces(state.parameter.detach())
        }


@dataclass(frozen=True)
class ParameterState:
    """The fp32 weight and the moments of one local parameter, wherever an optimizer of Megatron-Core keeps them.

    The distributed optimizer gives every data-parallel rank a range of the flattened elements, which ignores the
    parameter's rows and may be empty. Checkpoints need the parameter in one piece: one rank gathers it.
    """

    parameter: nn.Parameter
    # what the optimizer updates: the parameter, its fp32 copy, or this rank's range of either; None: empty range
    main: Tensor | None
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    # elements of the flattened parameter on each rank of the group
    ranges: tuple[range, ...]
    # what a tensor in the shape of the parameter holds of transformers' tensors
    pieces: PiecesOf

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Full shapes by the names of transformers."""
        return {piece.hf_name: list(piece.hf_shape) for piece in self.pieces(self.parameter.detach())}

    @property
    def is_owner(self) -> bool:
        """Whether this process, of the tensor-parallel ranks and stages with the same pieces, writes them."""
        if getattr(self.parameter, "shared", False):  # the last stage has a copy of a tied embedding
            return False
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        return is_first or all(piece.mesh_dim is not None for piece in self.pieces(self.parameter.detach()))

    @property
    def is_writer(self) -> bool:
        """Whether `gather` returns the tensor on this rank: the one that already has the most elements."""
        return self.group.rank() == self._writer

    @property
    def _writer(self) -> int:
        sizes = [len(each) for each in self.ranges]
        return sizes.index(max(sizes))

    @property
    def num_steps(self) -> float | None:
        """Updates so far, for the bias correction of the moments; None before the first. On the writer only."""
        if self.main is None or not (state := self.optimizer.state.get(self.main)):
            return None
        if _STEP in state:
            return float(state[_STEP])
        # the fused optimizers of Apex and Transformer Engine count per group
        groups = [group for group in self.optimizer.param_groups if any(p is self.main for p in group["params"])]
        return float(groups[0][_STEP])

    def shards(self, key: str) -> dict[str, TensorShard]:
        """The shards of the weight or a moment that this process writes; collective over data-parallel ranks."""
        whole = self.gather(key)
        if whole is None or not self.is_owner:
            return {}
        return {
            piece.hf_name: TensorShard(piece.values(), piece.hf_shape, tuple(each.start for each in piece.slices))
            for piece in self.pieces(whole)
        }

    def load(self, weights: ShardedReader, moments: ShardedReader, *, has_moments: bool) -> None:
        """Read the slices of this process, bitwise."""
        name = next(iter(self.shapes), None)
        if name is None:  # only padding of the vocabulary
            return
        num_steps = float(moments.read(f"{_STEP}/{name}")) if has_moments else None
        read = {key: self._read(moments, f"{key}/") for key in (_MOMENTS if has_moments else ())}
        self.assign(self._read(weights, ""), read, num_steps)

    def _read(self, reader: ShardedReader, prefix: str) -> Tensor:
        whole = torch.zeros(self.parameter.shape)
        for piece in self.pieces(whole):
            piece.copy_(reader.read(prefix + piece.hf_name, piece.slices))
        return whole

    def gather(self, key: str) -> Tensor | None:
        """Return the weight or a moment in the shape of the parameter, on the writer; collective in the group."""
        local = self.main
        if local is not None and key != _WEIGHT:
            local = self.optimizer.state.get(local, {}).get(key)
        if len(self.ranges[self._writer]) == self.parameter.numel():
            return None if local is None or not self.is_writer else local.detach().view(self.parameter.shape)
        whole = torch.empty(self.parameter.numel(), dtype=torch.float32, device=self.parameter.device)
        for rank, elements in enumerate(self.ranges):
            if not elements:
                continue
            if rank == self.group.rank():
                assert local is not None  # noqa: S101
                whole[elements.start : elements.stop] = local.detach().view(-1)
                if not self.is_writer:
                    dist.send(local.detach().view(-1).contiguous(), group=self.group, group_dst=self._writer)
            elif self.is_writer:
                received = whole.new_empty(len(elements))
                dist.recv(received, group=self.group, group_src=rank)
                whole[elements.start : elements.stop] = received
        # many parameters are gathered before they are written: not all of them on the device
        return whole.view(self.parameter.shape).cpu() if self.is_writer else None

    @torch.no_grad()
    def assign(self, weight: Tensor, moments: dict[str, Tensor], num_steps: float | None) -> None:
        """Set the parameter and this rank's part of its state from tensors in the shape of the parameter."""
        self.parameter.copy_(weight)
        if self.main is None:
            return
        self.main.copy_(self._part(weight))
        self.optimizer.state.pop(self.main, None)
        if num_steps is None:
            return
        state: dict[str, Any] = {
            key: self._part(moment).to(self.main.device, torch.float32, copy=True) for key, moment in moments.items()
        }
        if isinstance(self.optimizer, torch.optim.AdamW):
            state[_STEP] = torch.tensor(num_steps)
        else:
            for group in self.optimizer.param_groups:
                group[_STEP] = int(num_steps)
        self.optimizer.state[self.main] = state

    def _part(self, tensor: Tensor) -> Tensor:
        assert self.main is not None  # noqa: S101
        elements = self.ranges[self.group.rank()]
        return tensor.reshape(-1)[elements.start : elements.stop].view(self.main.shape)


def _parameter_states(
    optimizer: Any, chunks: Sequence[DistributedDataParallel], pieces: Mapping[nn.Parameter, PiecesOf]
) -> list[ParameterState]:
    """List the parameters of one optimizer of Megatron-Core, in the order of the model; collective.

    All ranks of a data-parallel group have the same parameters, in the same order.
    """
    is_expert = all(group["is_expert_parallel"] for group in optimizer.param_groups)
    parameters = [
        parameter
        for chunk in chunks
        for parameter in chunk.module.parameters()
        if parameter.requires_grad and getattr(parameter, "allreduce", True) != is_expert
    ]
    group = chunks[0].intra_expt_dp_group if is_expert else chunks[0].intra_dp_cp_group
    mains, local = _main_parameters(optimizer), [range(parameter.numel()) for parameter in parameters]
    of_ranks = [local] * group.size()
    if isinstance(optimizer, DistributedOptimizer):
        local = [_local_range(optimizer, parameter) for parameter in parameters]
        dist.all_gather_object(of_ranks, local, group=group)
    return [
        ParameterState(parameter, mains.get(parameter), optimizer.optimizer, group, ranges, pieces[parameter])
        for parameter, ranges in zip(parameters, zip(*of_ranks, strict=True), strict=True)
    ]


def _main_parameters(optimizer: Any) -> dict[nn.Parameter, Tensor]:
    """What an optimizer updates, by the parameter of the model."""
    if isinstance(optimizer, DistributedOptimizer):
        places = optimizer.model_param_group_index_map.items()
        return {parameter: optimizer.param_groups[group]["params"][at] for parameter, (group, at) in places}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [*zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)]
        pairs += zip(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups, strict=True)
        return {model: main for models, mains in pairs for model, main in zip(models, mains, strict=True)}
    return {parameter: parameter for group in optimizer.param_groups for parameter in group["params"]}


def _local_range(optimizer: DistributedOptimizer, parameter: nn.Parameter) -> range:
    if parameter not in optimizer.model_param_gbuf_map:
        return range(0)
    elements = optimizer._get_model_param_range_map(parameter)["param"]
    return range(elements.start, elements.end)


@dataclass(frozen=True)
class MegatronCheckpoint:
    """The slices that this process writes and reads."""

    states: Sequence[ParameterState]
    world: Group

    def weight_shards(self, extra: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Shard]]:
        if extra:  # the check rejects a synced reference
            raise ValueError(f"Megatron-Core cannot save the tensors {', '.join(extra)}")
        return {STEM: {name: shard for each in self.states for name, shard in each.shards(_WEIGHT).items()}}

    def optimizer_shards(self) -> tuple[dict[str, Shard], dict[str, Any] | None]:
        shards: dict[str, Shard] = {}
        for each in self.states:
            for key in _MOMENTS:
                shards |= {f"{key}/{name}": shard for name, shard in each.shards(key).items()}
            if each.is_owner and each.is_writer and (num_steps := each.num_steps) is not None:
                scalar = TensorShard(torch.tensor(num_steps), (), ())
                shards |= {f"{_STEP}/{name}": scalar for name in each.shapes}
        stepped = {name: None for each in self.states if each.num_steps is not None for name in each.shapes}
        gathered = self.world.gather_object(adamw_values(self._shapes, stepped))
        return shards, None if gathered is None else join_values(gathered)

    def load(self, directory: Path, values: dict[str, Any]) -> None:
        shapes = self._shapes
        expected = {name: (tuple(shape), torch.float32) for name, shape in shapes.items()}
        others = self.world.names_on_other_ranks(expected)
        with ShardedReader(directory, STEM) as weights, ShardedReader(directory, OPTIMIZER) as moments:
            check_specs(directory, weights.specs(), expected, hint=RESUME_HINT, other_rank_names=others)
            check_groups(values, ADAMW, adamw_groups(shapes), others)
            for each in self.states:
                each.load(weights, moments, has_moments=bool(each.shapes.keys() & values["values"].keys()))

    @property
    def _shapes(self) -> dict[str, list[int]]:
        return {name: shape for each in self.states for name, shape in each.shapes.items()}
