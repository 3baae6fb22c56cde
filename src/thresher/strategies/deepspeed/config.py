"""The config for `deepspeed.initialize`: what the user may choose, and what follows from the semantics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# DeepSpeed's default, in elements
_MAX_BUCKET = 500_000_000


def engine_config(stage: int, zero_options: Mapping[str, Any], *, num_trained: int = 0) -> dict[str, Any]:
    """Return the config of an engine.

    zero_options: the user's section of ZeRO. num_trained: elements of the trained parameters; 0 if there are none, or
    they are not known yet.
    """
    # memory_efficient_linear would replace torch's linear function in the whole process
    zero: dict[str, Any] = {"memory_efficient_linear": False, **zero_options, "stage": stage}
    if num_trained:
        # DeepSpeed allocates a whole bucket, and it never holds more than all gradients
        zero.setdefault("reduce_bucket_size", min(num_trained, _MAX_BUCKET))
    if stage in (1, 2):
        # thresher measures the norm before DeepSpeed's step; with offload DeepSpeed insists on measuring it again
        zero["compute_grad_norm"] = "offload_optimizer" in zero
    return {
        # required by DeepSpeed, and read by nothing: thresher makes the micro-batches and accumulates their gradients
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # see parameters.py
        # the loss is already divided by the pairs of the whole step; stage 3 can only average (see parameters.py)
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",
        "zero_optimization": zero,
        # torch's AdamW, also for states in host memory: DeepSpeed's own is compiled at run time
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
