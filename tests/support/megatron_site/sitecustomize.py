"""For PYTHONPATH of a process without a GPU: stands in for torch.cuda as soon as the Megatron strategy is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_BUILD = "thresher.engines.megatron.build"


class _BeforeMegatron(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname == _BUILD:
            sys.meta_path.remove(self)
            from tests.support.megatron_cpu import use_cpu_as_cuda

            use_cpu_as_cuda()
        return None


sys.meta_path.insert(0, _BeforeMegatron())
