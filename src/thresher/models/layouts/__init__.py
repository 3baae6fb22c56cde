"""Layouts: how the pairs of a micro-batch lie in a model's input. One interface, one numerics."""

from thresher.models.layouts.layout import Layout, ModelInputs
from thresher.models.layouts.packed import PackedLayout
from thresher.models.layouts.padded import PaddedLayout

__all__ = ["Layout", "ModelInputs", "PackedLayout", "PaddedLayout"]
