"""Build the DeepSpeed engine: ZeRO stages 0 to 3 with the semantics of a step that every engine has.

DeepSpeed partitions parameters, gradients and optimizer state, and moves them between devices. Forward, loss and
metrics are the same as in every engine, the optimizer is torch's AdamW, and the decision to skip a step is made before
DeepSpeed's step begins (see parameters.py).
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedModel

from thresher.distributed.groups import DataParallelGroup
from thresher.engines.deepspeed.declaration import ZeroSettings
from thresher.engines.deepspeed.parameters import (
    PartitionedAdamW,
    PartitionedCheckpoint,
    PartitionedParameters,
    find_partitions,
)
from thresher.engines.engine import Engine, TrainEngine
from thresher.engines.native.build import build_replica
from thresher.engines.native.optimizers.groups import parameter_groups
from thresher.engines.native.optimizers.registry import adamw_options
from thresher.engines.native.sequential import SequentialExecutor, with_balance
from thresher.engines.nonfinite import LossScale
from thresher.engines.spec import ModelSpec, seed_dropout
from thresher.errors import UserError
from thresher.models.loading.adapters import adapter_disabled, attach_adapter
from thresher.models.loading.load_sharded import load_modules, move_buffers, stores_every_parameter
from thresher.models.logps import PairModel, base_model
from thresher.models.optimizations.recompute import recompute_activations

# DeepSpeed's default, in elements
_MAX_BUCKET = 500_000_000
_JOINED = "thresher_world"  # attribute of DeepSpeed's backend: the default group that it was created for


def build_train(spec: ModelSpec[ZeroSettings]) -> TrainEngine:
    """Load the policy, attach adapters if it has any, and partition it with its optimizer."""
    deepspeed = _import_deepspeed(spec.device)
    stage, training = spec.settings.stage, spec.training
    module, shapes = _load_model(deepspeed, spec, spec.trained.apply, lambda model: spec.trained.init(model, spec.seed))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    recompute_activations(base_model(module), training.gradient_checkpointing, offload=training.activation_offload)
    seed_dropout(spec.seed, spec.world.rank)
    # a partitioned parameter has lost its shape
    num_dims = {parameter: len(shapes[name]) for name, parameter in trained.items()}
    groups = parameter_groups(trained, training, num_dims=num_dims.__getitem__)
    optimizer = PartitionedAdamW(groups, **adamw_options(training))
    engine, *_ = deepspeed.initialize(
        model=base_model(module),
        optimizer=optimizer,
        config=engine_config(spec.settings, num_trained=sum(math.prod(shapes[name]) for name in trained)),
        dist_init_required=False,
    )
    dp_group = _data_parallel_group(spec)
    model = with_balance(_pair_model(spec, module, engine), spec.model_args, dp_group)
    partitions = find_partitions(stage, engine.optimizer, trained, shapes)
    parameters = PartitionedParameters(engine, optimizer, partitions, dp_group, stage)

    def run_backward(loss: Tensor, is_last: bool) -> None:
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(loss, scale_wrt_gas=False)

    return TrainEngine(
        model=module.train(),
        executor=SequentialExecutor(model, spec.layout, run_backward),
        dp_group=dp_group,
        device=model.device,
        hidden_size=model.hidden_size,
        parameters=parameters,
        checkpoint=PartitionedCheckpoint(parameters, trained, shapes),
        training=training,
        adapter_disabled=partial(adapter_disabled, module),
        scaler=LossScale.of(training, spec.compute_dtype),
    )


def build_infer(spec: ModelSpec[ZeroSettings]) -> Engine:
    """Load a frozen model: partitioned at stage 3, otherwise a full copy per process."""
    if spec.settings.stage < 3:
        return build_replica(spec)
    deepspeed, adapter = _import_deepspeed(spec.device), spec.adapter

    def prepare(model: PreTrainedModel) -> nn.Module:
        return (model if adapter is None else attach_adapter(model, adapter)).requires_grad_(False)

    def init_adapters(model: PreTrainedModel) -> None:
        if adapter is not None:
            adapter.load(model)

    module = _load_model(deepspeed, spec, prepare, init_adapters)[0].eval()
    engine, *_ = deepspeed.initialize(
        model=base_model(module), config=engine_config(spec.settings), dist_init_required=False
    )
    model = _pair_model(spec, module, engine)
    executor = SequentialExecutor(model, spec.layout)
    return Engine(module, executor, _data_parallel_group(spec), model.device, model.hidden_size)


def _pair_model(spec: ModelSpec[ZeroSettings], module: nn.Module, engine: Any) -> PairModel:
    # ZeRO-3 gathers parameters by hooks around the modules that have them
    is_partitioned = spec.settings.stage == 3
    return PairModel.for_layout(module, spec.compute_dtype, spec.layout, engine=engine, calls_head=is_partitioned)


def _data_parallel_group(spec: ModelSpec[ZeroSettings]) -> DataParallelGroup:
    """The data-parallel ranks, which are all processes; a backward is a collective call at every ZeRO stage."""
    world = spec.world
    return DataParallelGroup(world.rank, world.size, world.group, needs_lockstep=True, reduces_gradients=False)


def engine_config(settings: ZeroSettings, *, num_trained: int = 0) -> dict[str, Any]:
    """The config for `deepspeed.initialize`: what the user may choose, and what follows from the semantics of a step.

    num_trained: elements of the trained parameters; 0 if there are none, or they are not known yet.
    """
    stage = settings.stage
    # memory_efficient_linear would replace torch's linear function in the whole process
    zero: dict[str, Any] = {"memory_efficient_linear": False, **settings.zero_options, "stage": stage}
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


def _load_model(
    deepspeed: Any,
    spec: ModelSpec[ZeroSettings],
    prepare: Callable[[PreTrainedModel], nn.Module],  # adds adapters and freezes parameters
    init_adapters: Callable[[PreTrainedModel], None],  # sets the values of new adapters
) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Load a model; for ZeRO-3, parameters are read and partitioned one module at a time.

    Returns the model on its device, and what partitioning hides: the shapes of its parameters by name.
    """
    device, is_partitioned = spec.device, spec.settings.stage == 3
    model = spec.empty() if is_partitioned else spec.load()
    by_module = is_partitioned and stores_every_parameter(model, spec.path)
    if is_partitioned and not by_module:
        # transformers converts the whole model; DeepSpeed partitions it from host memory when the engine starts
        model = spec.load()
    causal_lm = prepare(model)
    shapes = {name: tuple(p.shape) for name, p in causal_lm.named_parameters()}
    if by_module:
        for name, module in model.named_modules():
            if ".lora_" in f".{name}":
                module.to_empty(device=device, recurse=False)
    elif is_partitioned:
        move_buffers(model, device)
    else:
        causal_lm.to(device)
    init_adapters(model)
    if by_module:
        config = engine_config(spec.settings)

        def partition(module: nn.Module) -> None:
            deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=torch.float32)

        load_modules(model, spec.path, device, partition, spec.merged)
    if is_partitioned:
        # ZeRO-3 requires that all ranks call the same modules in the same order. The experts of transformers are in
        # stacked matrices. Without a grouped matrix product for them, as in LongCat-Flash, the activation is called
        # once for each expert that tokens of the micro-batch are routed to.
        for name, shape in shapes.items():
            if len(shape) == 3:
                deepspeed.utils.set_z3_leaf_module(causal_lm.get_submodule(name.rpartition(".")[0]), True)
    return causal_lm, shapes


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device; DeepSpeed reads the device from the environment, at its import and later."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise it looks for accelerators of every vendor
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # of the device, as torchrun sets it
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed

    accelerator = str(deepspeed.accelerator.get_accelerator().device_name())
    if accelerator != device.type:  # another library has imported it before
        raise UserError(
            f"DeepSpeed uses the device {accelerator}, and the model is on {device.type}; set the environment variable "
            f"DS_ACCELERATOR={device.type}"
        )
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.utils.logger.addFilter(_can_be_acted_on)
    # collectives that this version of torch renames
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if device.type == "cpu":
        # collectives in shared memory, which DeepSpeed would compile at start-up for minutes; gloo serves as well
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _join_process_group(deepspeed, device)
    return deepspeed


def _can_be_acted_on(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()  # a subclass of torch's AdamW


def _join_process_group(deepspeed: Any, device: torch.device) -> None:
    if not dist.is_initialized():  # a single process; DeepSpeed needs a group of one
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    comm: Any = deepspeed.comm.comm
    if comm.cdb is not None and vars(comm.cdb).get(_JOINED) is not dist.group.WORLD:
        # a group that has been destroyed since, of an earlier run in this process
        deepspeed.utils.groups._release_process_group_references()
        comm.cdb = None
    if comm.cdb is None:
        deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        setattr(comm.cdb, _JOINED, dist.group.WORLD)
