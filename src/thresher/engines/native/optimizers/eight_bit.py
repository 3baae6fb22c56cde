"""AdamW of bitsandbytes, with its state in 8 or 32 bits, or paged; imported only if a run uses it.

Paged state moves between the GPU and the host as memory is needed. On a CPU it is in host memory anyway, and the same
optimizer without pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitsandbytes.optim.adamw import AdamW
from torch import nn

from thresher.config.roles import TrainingArgs
from thresher.engines.native.optimizers.blocks import has_blocks

_Base: Any = AdamW  # its methods have no types


class _AdamW(_Base):  # type: ignore[misc]
    """The same updates for every sharding of the parameters."""

    bits: int

    def __init__(
        self,
        groups: list[dict[str, Any]],
        training: TrainingArgs,
        num_elements: Mapping[nn.Parameter, int],
        *,
        is_paged: bool,
    ) -> None:
        super().__init__(
            groups,
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_epsilon,
            weight_decay=training.weight_decay,
            optim_bits=self.bits,
            is_paged=is_paged,
        )
        self._num_elements = num_elements

    def init_state(self, group: Any, p: nn.Parameter, gindex: int, pindex: int) -> None:
        # by the size of the whole parameter, not of the shard
        self.args.min_8bit_size = 0 if has_blocks(p.ndim, self._num_elements[p]) else p.numel() + 1
        super().init_state(group, p, gindex, pindex)

    def update_step(self, group: Any, p: nn.Parameter, gindex: int, pindex: int) -> None:
        if p.numel():  # with more processes than rows, some have an empty shard, and kernels need an element
            super().update_step(group, p, gindex, pindex)

    def move_to_pages(self) -> None:
        """Let a state that was read from a checkpoint be paged as a new one is."""
        for parameter, state in self.state.items():
            for key in ("state1", "state2"):
                if key in state:
                    state[key] = self.get_state_buffer(parameter, dtype=state[key].dtype).copy_(state[key])


class AdamW8bit(_AdamW):
    bits = 8


class AdamW32bit(_AdamW):
    bits = 32
