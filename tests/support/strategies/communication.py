"""Count the bytes that a process sends and receives in an optimizer step, by kind of collective."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.strategies.parity import Case, load_parallel, make_policy, make_trainer

# for an all-gather count the output, for every other collective the input
_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
_WITHOUT_PAYLOAD = {"wait_tensor", "barrier", "_wrap_tensor_autograd"}


class CommunicationCounter(TorchDispatchMode):
    """Bytes of every collective of this process, by kind; an unknown kind is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor dispatches the local operations again
        made = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name not in _WITHOUT_PAYLOAD:
                kind = _KINDS[name]
                is_functional = func.namespace == "_c10d_functional"
                payload = made if kind == "all_gather" and is_functional else _payload(name, args)
                self.bytes[kind] += sum(t.nbytes for t in tree_leaves(payload) if isinstance(t, Tensor))
        return made


def _payload(name: str, args: Any) -> Any:
    """(output, input, group, ...) in c10d where there are two tensors."""
    has_two = name in ("_reduce_scatter_base_", "alltoall_base_")
    return args[1] if has_two else args[0]


def count_step(case: Case, model_dir: Path) -> dict[str, int]:
    """Count the second optimizer step on this rank, with a loss without reference."""
    trainer = make_trainer(make_policy(case, *load_parallel(case, model_dir)), None, case)
    trainer.training_step()
    with CommunicationCounter() as counter:
        trainer.training_step()
    return dict(counter.bytes)
