"""Dynamic loss scale of fp16: the loss is multiplied by it, so that small gradients do not round to 0 in fp16.

The rules and defaults of torch.amp.GradScaler, with two differences: the scale has a minimum, and only an overflow of
the gradient halves it, because a loss that is not finite does not depend on the scale. GradScaler itself
reduces overflows over the mesh of the first gradient only, so pipeline stages and plain replicas would disagree; here
the gradient norm of the whole model decides, which is equal on every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thresher.strategies.nonfinite import Reason

MIN_SCALE = 1.0
# beyond it the scale would not be finite in fp32
MAX_SCALE = 2.0**127


@dataclass
class LossScale:
    """The scale of the next step; doubled after `window` steps in a row without an overflow, halved by each overflow.

    value: a power of two, so that scaling and unscaling round nothing. steps: those without an overflow since the last
    change.
    """

    value: float = 2.0**16
    window: int = 2000
    steps: int = 0

    def after_step(self, reason: Reason | None) -> Reason | None:
        """Update the scale; return why the step is skipped: an overflow is a failure only at the minimum scale."""
        if reason == "gradient":
            self.steps = 0
            if self.value > MIN_SCALE:
                self.value /= 2.0
                return "overflow"
        elif reason is None:
            self.steps += 1
            if self.steps == self.window:
                self.value, self.steps = min(self.value * 2.0, MAX_SCALE), 0
        return reason

    def state(self) -> dict[str, float | int]:
        return {"value": self.value, "steps": self.steps}

    def load(self, state: Mapping[str, float | int]) -> None:
        self.value, self.steps = float(state["value"]), int(state["steps"])
