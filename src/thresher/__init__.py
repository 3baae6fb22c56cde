"""thresher: preference optimization for language models."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thresher.api.results import TrainResult
    from thresher.api.trainer import DPOTrainer, train
    from thresher.config import DPOConfig, load_config
    from thresher.errors import UserError
    from thresher.pipeline import DPOPipeline

__version__ = "0.3.0.dev0"

__all__ = ["DPOConfig", "DPOPipeline", "DPOTrainer", "TrainResult", "UserError", "load_config", "train"]


_HOMES = {
    "DPOConfig": "thresher.config",
    "DPOPipeline": "thresher.pipeline",
    "DPOTrainer": "thresher.api.trainer",
    "TrainResult": "thresher.api.results",
    "UserError": "thresher.errors",
    "load_config": "thresher.config",
    "train": "thresher.api.trainer",
}


# an application decides what is shown; without a handler Python would print warnings by itself
logging.getLogger(__name__).addHandler(logging.NullHandler())
# transformers imports DeepSpeed if it is installed, and on a CPU DeepSpeed prints this to stdout
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def __getattr__(name: str) -> object:
    # lazy: `thresher --help` must not wait for torch
    if name in _HOMES:
        importlib.import_module("thresher.importers").install()
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'thresher' has no attribute {name!r}")
