"""The logistic loss with label smoothing, which DPO and AOT share."""

import torch.nn.functional as F
from torch import Tensor


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """Compute -(1 - eps) logsig(x) - eps logsig(-x)."""
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
