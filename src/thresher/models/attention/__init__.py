"""Attention over packed pairs: which rows see which, on every device, behind transformers' attention interface."""

from thresher.models.attention.interface import PAIR_ATTENTION, register_pair_attention
from thresher.models.attention.segments import Segment

__all__ = ["PAIR_ATTENTION", "Segment", "register_pair_attention"]
