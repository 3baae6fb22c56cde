"""Layouts: how the pairs of a micro-batch are arranged in a model's input. All layouts give the same logps."""

from thresher.models.layouts.layout import Layout, ModelInputs
from thresher.models.layouts.packed import PackedLayout
from thresher.models.layouts.padded import PaddedLayout

__all__ = ["Layout", "ModelInputs", "PackedLayout", "PaddedLayout"]
