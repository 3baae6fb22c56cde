"""Trained parameters of this process: local shards, their gradients, their optimizer and checkpoint files.

The loss is already divided by the pairs of the whole step (see accumulate.py), so every reduction is a sum:

    dimension     gradients                                       summed by
    dp_shard, cp  all                                             FSDP2, in every backward or the last one (fsdp.py)
    dp_replicate  all                                             FSDP2 in the last backward if dp_shard or cp > 1,
                                                                  otherwise here, in the last backward too
    tp            of replicated parameters, as each rank has a    here
                  partial sum: norms within heads, and all norms
                  with sequence parallelism
    pp            of an embedding tied to the head                here, by the first and the last stage

Files record the slice of each shard, not the mesh, so any number of processes along any mesh dimensions can load them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.state import STEM, State, join_values, load_optimizer_state, load_weights, optimizer_state
from thresher.checkpoint.tensor_files import LocalShards, Shard, ShardedReader, Slices, TensorShard, shards_to_write
from thresher.checkpoint.tensor_index import Shape
from thresher.config.roles import ModelArgs, TrainingArgs
from thresher.distributed.replicas import ReplicaSums, all_reduce_bucketed, complete
from thresher.distributed.tensors import local_slices, to_local
from thresher.engines.native.optimizers.blocks import blocks_of_shard, num_blocks
from thresher.engines.native.optimizers.groups import group_rules, parameter_groups
from thresher.engines.native.optimizers.registry import OPTIMIZERS, Shards, build_optimizer
from thresher.engines.native.parallelize import ParallelContext
from thresher.engines.policy_files import OPTIMIZER, RESUME_HINT
from thresher.losses.pairs import to_fp64
from thresher.models.pipeline_chunk import decoder_of


def squared_norm(gradients: Sequence[Tensor], factor: float = 1.0) -> Tensor | float:
    """The sum of the squares of gradients times a factor, in fp64."""
    return (to_fp64(nn.utils.get_total_norm(gradients)) * factor).square() if gradients else 0.0


def count_zeros(gradients: Sequence[Tensor], counted: Tensor | None = None) -> Tensor | float:
    """Count the elements that are 0; counted: whether to, for each gradient."""
    if not gradients:
        return 0.0
    zeros = torch.stack([each.numel() - each.count_nonzero() for each in gradients])
    return (zeros if counted is None else zeros * counted).sum()


class LocalParameters:
    """The trained parameters by name, and this process's shard of each as a plain tensor."""

    def __init__(
        self,
        model: nn.Module,
        base_model: PreTrainedModel,
        parallel: ParallelContext,
        training: TrainingArgs,
        model_args: ModelArgs = ModelArgs(),  # noqa: B008  # frozen
    ):
        self.parallel = parallel
        self.by_name = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # parameter -> shard, which shares its memory; the parameter itself if it is not a DTensor
        self.shards = {p: nn.Parameter(p.to_local()) if isinstance(p, DTensor) else p for p in self.by_name.values()}
        layers = nn.ModuleList(getattr(decoder_of(base_model), "layers", ()))
        named = {name: self.shards[parameter] for name, parameter in self.by_name.items()}
        self.kind = OPTIMIZERS[training.optim]
        self.optimizer = build_optimizer(
            parameter_groups(named, training, group_rules(training, model_args)),
            training,
            Shards(
                [self.shards[parameter] for parameter in layers.parameters() if parameter in self.shards],
                {shard: parameter.numel() for parameter, shard in self.shards.items()},
            ),
        )
        trained = [(name, p) for name, p in base_model.named_parameters() if p in self.shards]
        self._partial_over_tp = [p for name, p in trained if name in parallel.partial_grad_params]
        dp_group = parallel.dp_group
        has_replicas = dp_group.size > 1 and dp_group.reduces_gradients and bool(self.shards)
        self.replicas = ReplicaSums(list(self.shards), dp_group) if has_replicas else None  # None: FSDP2 sums them
        stage = parallel.stage
        self._tied = [] if stage is None else [p for name, p in trained if name in stage.tied_weights]
        self._owned_by_first_stage: set[Tensor] = set(self._tied) if stage is not None and stage.is_last else set()

    @property
    def shard_names(self) -> dict[nn.Parameter, str]:
        return {self.shards[parameter]: name for name, parameter in self.by_name.items()}

    def owns(self, parameter: Tensor) -> bool:
        """Whether this process, of all that hold the same shard, adds it to the norm and writes it to checkpoints."""
        return parameter not in self._owned_by_first_stage and self.parallel.owns(parameter)

    def reduce_gradients(self) -> None:
        """Sum the gradients of the step over ranks, once after its last backward, and set them on the shards."""
        if self.replicas is not None:
            self.replicas.finish()
        else:
            for parameter in self.shards:
                complete(parameter)
        if self.parallel.tp.size > 1:
            all_reduce_bucketed(_local_gradients(self._partial_over_tp), self.parallel.tp)
        if self.parallel.stage is not None:
            self.parallel.stage.reduce_tied_gradients(_local_gradients(self._tied))
        self._set_on_shards()

    def _set_on_shards(self) -> None:
        for parameter, shard in self.shards.items():
            if shard is not parameter:
                shard.grad = None if parameter.grad is None else to_local(parameter.grad)

    def squared_norm(self) -> Tensor | float:
        return squared_norm([gradient for _, gradient in self._owned()])

    def count_zeros(self) -> Tensor | float:
        owned = self._owned()
        used = self.replicas.is_used([p for p, _ in owned]) if self.replicas is not None and owned else None
        return count_zeros([gradient for _, gradient in owned], used)

    def scale(self, factor: float) -> None:
        if gradients := [p.grad for p in self.shards.values() if p.grad is not None]:
            torch._foreach_mul_(gradients, factor)

    def _owned(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters of which this process has a gradient that no process before it has, with the gradient."""
        return [(p, shard.grad) for p, shard in self.shards.items() if shard.grad is not None and self.owns(p)]

    def update(self, learning_rate: float) -> None:
        if self.replicas is not None:
            self.replicas.drop_unused()
            self._set_on_shards()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_ratio"]
        self.optimizer.step()

    def zero_grad(self) -> None:
        for parameter, shard in self.shards.items():
            parameter.grad = shard.grad = None

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.by_name.items()}

    @contextmanager
    def within_step(self, copies: HostBuffers | None) -> Iterator[None]:
        """Within a step, sum gradients of replicas in the last backward, and have the weights to take gradients at.

        A schedule-free optimizer takes them at other weights than the average, which evaluation, samples, checkpoints
        and a synced reference see; how often changes no step.
        """
        if self.replicas is not None:
            self.replicas.begin_step()
        if not self.kind.averages:
            yield
            return
        if copies is not None:
            copies.hold_changes()
        optimizer: Any = self.optimizer
        shards = list(self.shards.values())
        averages, num_steps = [shard.detach().clone() for shard in shards], optimizer.param_groups[0]["k"]
        optimizer.train()
        try:
            yield
        finally:
            optimizer.eval()
            if optimizer.param_groups[0]["k"] == num_steps:  # a step that was skipped changes no bit
                for shard, average in zip(shards, averages, strict=True):
                    shard.detach().copy_(average)


def _local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [to_local(p.grad) for p in parameters if p.grad is not None]


@dataclass(frozen=True)
class LocalCheckpoint:
    """The shards that this process writes, of which it is the owner, and those that it reads."""

    parameters: LocalParameters

    def weight_shards(self, extra: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Shard]]:
        by_stem = {STEM: self.parameters.by_name, **extra}
        return {stem: dict(shards_to_write(each, each, self.parameters.owns)) for stem, each in by_stem.items()}

    def optimizer_shards(self) -> tuple[dict[str, Shard], dict[str, Any] | None]:
        parameters, owns = self.parameters.by_name, self.parameters.owns
        state = optimizer_state(self.parameters.optimizer, self.parameters.shard_names, parameters)
        scales = {name: tensor for name, tensor in state.tensors.items() if _is_of_blocks(name)}
        others = {name: tensor for name, tensor in state.tensors.items() if name not in scales}
        # moments are sharded like their parameter; a step count, or a sum of rows, is whole on every process
        sharded_like = {name: self._like(name, tensor) for name, tensor in others.items()}
        shards: dict[str, Shard] = dict(shards_to_write(others, sharded_like, owns))
        for name, tensor in scales.items():
            parameter = parameters[_parameter_of(name)]
            if owns(parameter) and tensor.numel():
                shards[name] = TensorShard(tensor, (num_blocks(parameter.numel()),), (_blocks_of(parameter).start,))
        # optimizer.json needs the non-tensor state of every pipeline stage once: from the owner of replicated tensors
        is_owner = owns(torch.zeros(()))
        gathered = self.parameters.parallel.dp_group.world.gather_object(state.values if is_owner else None)
        if gathered is None:
            return shards, None
        return shards, join_values([each for each in gathered if each is not None])

    def _like(self, name: str, state: Tensor) -> Tensor:
        parameter = self.parameters.by_name[_parameter_of(name)]
        is_whole = name.startswith("qmap") or to_local(parameter).shape != state.shape
        return state if is_whole else parameter

    def load(self, directory: Path, values: dict[str, Any]) -> None:
        parameters = self.parameters.by_name
        other_rank_names = self.parameters.parallel.dp_group.world.names_on_other_ranks(parameters)
        load_weights(directory, parameters, hint=RESUME_HINT, other_rank_names=other_rank_names)

        def slices_of(name: str, shape: Shape) -> Slices:
            parameter = parameters[_parameter_of(name)]
            if _is_of_blocks(name):
                return (_blocks_of(parameter),)
            return local_slices(parameter) if parameter.shape == shape else tuple(slice(0, size) for size in shape)

        optimizer, shard_names = self.parameters.optimizer, self.parameters.shard_names
        with ShardedReader(directory, OPTIMIZER) as stored:
            state = State(LocalShards(stored, slices_of), values)
            load_optimizer_state(optimizer, shard_names, state, parameters, other_rank_names)
        self.parameters.kind.after_load(optimizer)


def _parameter_of(name: str) -> str:
    return name.partition("/")[2]


def _is_of_blocks(name: str) -> bool:
    """Whether a state has a value per block of an 8-bit parameter: bitsandbytes' scales."""
    return name.startswith("absmax")


def _blocks_of(parameter: Tensor) -> slice:
    blocks = blocks_of_shard(parameter.shape, local_slices(parameter))
    assert blocks is not None  # noqa: S101
    return blocks
