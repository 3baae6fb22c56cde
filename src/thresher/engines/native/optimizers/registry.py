"""Optimizers by the name in `training_args.optim`: those of libraries, over the shards of this process.

Most are elementwise, so a step does not depend on the sharding. Others need whole matrices, and each process a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thresher.config.roles import TrainingArgs
from thresher.engines.native.optimizers.blocks import BYTES_PER_ELEMENT
from thresher.models.loading.quantization import import_bitsandbytes
from thresher.optional import require

Groups = list[dict[str, Any]]  # as torch takes them


@dataclass(frozen=True)
class Shards:
    """What an optimizer may need to know of the parameters, which are shards of this process."""

    in_layers: Sequence[nn.Parameter]  # the matrices of the decoder's layers
    num_elements: Mapping[nn.Parameter, int]  # of the whole parameter


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer is made, and the size of its state."""

    build: Callable[[Groups, TrainingArgs, Shards], Optimizer]
    state: Callable[[TrainingArgs, int], float]  # bytes per element of parameters that are stored in so many bytes
    is_elementwise: bool = True
    is_blockwise: bool = False  # its state has blocks of elements
    # gradients are taken at other weights than those to evaluate and to save, which are kept during a step
    averages: bool = False
    accepts_fake_tensors: bool = True  # as `thresher plan --simulate` has
    after_load: Callable[[Any], None] = lambda _: None


def build_optimizer(groups: Groups, training: TrainingArgs, shards: Shards) -> Optimizer:
    return OPTIMIZERS[training.optim].build(groups, training, shards)


def state_bytes(training: TrainingArgs, stored: int) -> float:
    """Bytes that the optimizer keeps for an element of a parameter, which is stored in `stored` bytes."""
    return OPTIMIZERS[training.optim].state(training, stored)


def held_bytes(training: TrainingArgs, stored: int) -> float:
    """The same with the copies that it makes for the time of a step."""
    return state_bytes(training, stored) + stored * OPTIMIZERS[training.optim].averages


def adamw_options(training: TrainingArgs) -> dict[str, Any]:
    """The arguments of torch's AdamW; every step sets its own learning rate."""
    return {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "fused": True,
    }


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of layers, and AdamW for all other parameters."""

    def __init__(self, groups: Groups, training: TrainingArgs, shards: Shards) -> None:
        chosen = {parameter for parameter in shards.in_layers if parameter.ndim == 2}
        parts: list[Groups] = [[], []]
        for part, is_chosen in zip(parts, (True, False), strict=True):
            for group in groups:
                part.append(group | {"params": [each for each in group["params"] if (each in chosen) == is_chosen]})
        settings: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", **training.optim_args}
        made = torch.optim.Muon([each for each in parts[0] if each["params"]], lr=training.learning_rate, **settings)
        other = torch.optim.AdamW(parts[1], **adamw_options(training))
        self._parts = (made, other)
        self.param_groups = [*made.param_groups, *other.param_groups]
        self.state = made.state = other.state
        self.defaults = {}

    def step(self, closure: Any = None) -> Any:
        for part in self._parts:
            part.step(closure)  # type: ignore[no-untyped-call]


def _adamw(groups: Groups, training: TrainingArgs, _shards: Shards) -> Optimizer:
    return torch.optim.AdamW(groups, **adamw_options(training))


def _of_torch(kind: Any, **options: Any) -> Callable[[Groups, TrainingArgs, Shards], Optimizer]:
    def build(groups: Groups, training: TrainingArgs, _shards: Shards) -> Optimizer:
        made: Optimizer = kind(groups, lr=training.learning_rate, **options, **training.optim_args)
        return made

    return build


def _of_bitsandbytes(num_bits: int, state: float, *, is_paged: bool = False) -> OptimizerKind:
    def build(groups: Groups, training: TrainingArgs, shards: Shards) -> Optimizer:
        require(f"optim {training.optim}", "bitsandbytes", extra="quantization", otherwise="use optim=adamw")
        import_bitsandbytes()
        from thresher.engines.native.optimizers.eight_bit import AdamW8bit, AdamW32bit

        kind = AdamW8bit if num_bits == 8 else AdamW32bit
        made: Optimizer = kind(groups, training, shards.num_elements, is_paged=is_paged)
        return made

    def after_load(optimizer: Any) -> None:
        if is_paged:
            optimizer.move_to_pages()

    return OptimizerKind(
        build,
        lambda *_: state,
        is_blockwise=num_bits == 8,
        accepts_fake_tensors=False,
        after_load=after_load,
    )


def _schedule_free(groups: Groups, training: TrainingArgs, _shards: Shards) -> Optimizer:
    require(f"optim {training.optim}", "schedulefree", extra="schedule-free", otherwise="use optim=adamw")
    from schedulefree import AdamWScheduleFree

    options = {name: value for name, value in adamw_options(training).items() if name != "fused"}
    made: Optimizer = AdamWScheduleFree(groups, **options, **training.optim_args)
    return made


def _tensors(number: float, *flags: str) -> Callable[[TrainingArgs, int], float]:
    """The size of a number of tensors like the parameter, and of one more for each argument that is on."""
    return lambda training, stored: stored * (number + sum(bool(training.optim_args.get(each)) for each in flags))


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(_adamw, _tensors(2)),
    "adamw_8bit": _of_bitsandbytes(8, 2 * BYTES_PER_ELEMENT),
    "paged_adamw_8bit": _of_bitsandbytes(8, 2 * BYTES_PER_ELEMENT, is_paged=True),
    "paged_adamw_32bit": _of_bitsandbytes(32, 2 * 4, is_paged=True),
    "schedule_free_adamw": OptimizerKind(_schedule_free, _tensors(2), averages=True),
    "sgd": OptimizerKind(_of_torch(torch.optim.SGD, fused=True), _tensors(0, "momentum"), accepts_fake_tensors=False),
    "rmsprop": OptimizerKind(_of_torch(torch.optim.RMSprop, foreach=True), _tensors(1, "momentum", "centered")),
    "adafactor": OptimizerKind(_of_torch(torch.optim.Adafactor), _tensors(0), is_elementwise=False),
    "muon": OptimizerKind(MuonAndAdamW, _tensors(1), is_elementwise=False),
}
