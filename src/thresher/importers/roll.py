"""ROLL (`start_dpo_pipeline.py`): our keys are ROLL's, so `thresher train` reads its configs too.

`READ` gives ROLL's own keys one meaning, for reading and for importing. An import also translates values of the keys
that ROLL and thresher share, and writes ROLL's defaults out; a config that is read keeps thresher's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from thresher.config.dpo import DPOConfig
from thresher.config.section import invalid_config, known_keys, merge_settings
from thresher.importers import huggingface
from thresher.importers import rules as r
from thresher.importers.engines import find_declared
from thresher.importers.translation import (
    DATA,
    ENGINE,
    EVAL_FILES,
    MODEL,
    SETS,
    TRAINING,
    Dialect,
    Entry,
    Rule,
    Translation,
)
from thresher.redact import redact

_ROLES = ("actor_train.", "reference.")
_SIZES = {
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "virtual_pipeline_model_parallel_size": "virtual_pp_size",
    **{name: name for name in ("tp_size", "pp_size", "cp_size")},
}
# settings of these engines have other names in ROLL
_NATIVE = ("fsdp2_train", "fsdp2_infer", "hf_infer")
_ATTENTION = {"fa2": "flash_attention_2", "auto": None, "disabled": "eager"}
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"} | {name: name for name in ("fp16", "bf16", "fp32")}
# ROLL renders native and qwen2_5 with the tokenizer's own chat template
_TEMPLATES = {**r.TEMPLATES, "native": "auto", "qwen2_5": "auto"}
# settings of engines for speed and memory
_ENGINE_ONLY = """
fsdp_size param_dtype reduce_dtype expert_model_parallel_size use_distributed_optimizer recompute_granularity
recompute_method recompute_num_layers recompute_modules moe_token_dispatcher_type bias_activation_fusion
moe_grouped_gemm moe_shared_expert_overlap moe_layer_recompute bf16 fp16 additional_configs overlap_grad_reduce
overlap_param_gather sequence_parallel gradient_accumulation_fusion gpu_memory_utilization
"""


def _moved(target: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Copy a key to another place here; `convert` makes our value of ROLL's, or None if it has no effect."""

    def function(value: Any, run: Translation) -> None:
        if (ours := convert(value)) is None:
            run.ignore("off")
        elif run.gives(target) and run.get(target) != ours and run.entries[-1].is_default:
            run.ignore(f"{target} is set")
        elif run.gives(target) and run.get(target) != ours:
            run.lacks(f"{target} is set too, and differs; keep {target}")
        else:
            run.set(target, ours)

    return r.by(function, target)


def _is_evaluated(run: Translation) -> bool:
    sources = (EVAL_FILES, f"{DATA}eval_file_name", "validation.data_args.store", SETS, "validation.split")
    return any(map(run.gives, sources))


def _set_global_template(value: Any, run: Translation) -> None:
    """Apply a template to the data that names none."""
    if value not in _TEMPLATES:
        return run.lacks(r.NAMED_TEMPLATE)
    for section in ("actor_train", *(["validation"] if run.gives(EVAL_FILES) else [])):
        if not run.gives(f"{section}.data_args.template"):
            run.set(f"{section}.data_args.template", _TEMPLATES[value])
    return None


def _schedule(value: Any, run: Translation) -> Any:
    """Megatron's `constant` has a warm-up, which ours has not."""
    warms_up = run.get(f"{TRAINING}warmup_steps") or run.get(f"{TRAINING}warmup_ratio")
    return "constant_with_warmup" if value == "constant" and warms_up else value


_OFFLOAD = f"use {ENGINE}cpu_offload to keep optimizer states on the host"
READ: r.Table = {
    f"{MODEL}disable_gradient_checkpointing": _moved(f"{TRAINING}gradient_checkpointing", lambda value: not value),
    f"{MODEL}ulysses_size": _moved(f"{ENGINE}cp_size"),
    f"{MODEL}adapter_name_or_path": r.ADAPTER,
    "actor_train.infer_batch_size": r.only_if(
        _is_evaluated, f"{TRAINING}per_device_eval_batch_size", "without validation.data_args"
    ),
    "actor_train.max_tokens_per_microbatch_in_train": _moved(f"{TRAINING}max_tokens_per_micro_batch"),
    f"{DATA}eval_file_name": _moved(EVAL_FILES),
    f"{DATA}prompt": _moved("prompt_key"),
    f"{TRAINING}lr_scheduler_type": r.by(
        lambda value, run: run.set(f"{TRAINING}lr_scheduler_type", _schedule(value, run)),
        f"{TRAINING}lr_scheduler_type",
    ),
    f"{TRAINING}num_train_epochs": _moved("num_train_epochs", lambda value: None if value == -1 else value),
    **{f"{TRAINING}{name}": _moved(name) for name in ("max_steps", "seed", "output_dir")},
    # mcore_adapter's switch
    "use_ref_model": _moved("reference.mode", lambda value: "auto" if value else "none"),
    "max_grad_norm": _moved(f"{TRAINING}max_grad_norm"),
    "max_ckpt_to_keep": _moved("save_total_limit", lambda value: value or None),  # 0 keeps all in ROLL
    **{f"tracker_kwargs.{name}": _moved(f"tracker_kwargs.wandb_{name}") for name in ("project", "mode", "api_key")},
    "tracker_kwargs.log_dir": _moved("tracker_kwargs.tensorboard_dir"),
    "global_template": r.by(_set_global_template, f"{DATA}template"),
    **r.drop("DPO has the roles actor_train and reference", "actor_infer critic rewards"),
    **r.drop("output_dir is the run directory", "base_dir"),
    **r.drop("checkpoints stay in output_dir; `thresher export` writes the model", "checkpoint_config"),
    **r.drop("models are read from a directory or from the Hugging Face Hub", "model_download_type"),
    **r.drop("the nodes follow from device_mapping and num_gpus_per_node", "num_nodes"),
    **r.drop("sequence_length limits prompt plus response", "prompt_length"),
    **r.drop("heartbeat_timeout detects workers that hang", "rpc_timeout"),
    **r.drop(_OFFLOAD, "is_offload_states is_offload_optimizer_states_in_train_step"),
    **r.drop("per_device_eval_batch_size sets the evaluation batch", "val_batch_size"),
    **r.drop(f"{MODEL}dtype sets the precision", f"{TRAINING}bf16 {TRAINING}fp16"),
    **r.drop("the mean over all pairs of a step is exact for every layout", "actor_train.apply_loss_scale"),
    **r.drop("a worker has one device", "actor_train.num_gpus_per_worker reference.num_gpus_per_worker"),
}
# packing, generation, profiling, vLLM, the worker processes, images and other pipelines; * also stands for either role
NEUTRAL = """
*.backend_timeout *.generating_args *.generating_args.* *.gpu_memory_utilization *.logits_in_fp32 *.max_concurrency
*.max_tokens_per_microbatch_in_infer *.model_args.device_map *.model_args.gradient_checkpointing_use_reentrant
*.model_update_frequency *.mtp_training_mode *.offload_nccl *.opd_kl_coef *.pg_variant *.router_replay
*.sequence_length_round_in_* *.sequence_packing_args *.sequence_packing_args.* *.tag_included *.topr_*_weight
*.use_dynamic_batching_in_* *.use_sequence_packing *.worker_cls *.world_size actor_train.data_args.audio_*
actor_train.data_args.custom_data_kwargs_func actor_train.data_args.dataset_type actor_train.data_args.id
actor_train.data_args.image_* actor_train.data_args.messages actor_train.data_args.response actor_train.data_args.tag
actor_train.data_args.video_* actor_train.model_args.autocast_adapter_dtype actor_train.model_args.num_labels
actor_train.name actor_train.training_args.data_seed actor_train.training_args.dataloader_num_workers
actor_train.training_args.save_hf_model actor_train.training_args.tf32 generate_opt_level hydra hydra.*
is_num_return_sequences_expand is_use_additional_prompts length_profiler_dir local_rank max_additional_running_prompts
max_running_requests model_update_buffer_size_mb otlp_output_dir pipeline_cls profiler_* reference.apply_loss_scale
reference.model_args.disable_gradient_checkpointing reference.name report_length_and_rewards response_length rollout_*
router_args router_args.* transfer_backend user_defined_rollout_loop_cls val_prompt_length val_sequence_length
"""


def read_own_keys(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config with ROLL's own keys translated, and one line per key that says how it was handled."""
    dialect = Dialect("roll", "ROLL", READ, tuple(NEUTRAL.split()), lambda _: {})
    config = copy.deepcopy(dict(values))
    given = {key: value for key, value in _flatten(config) if value is not None}
    own: dict[str, Rule] = {}
    for key in given:
        rule = dialect.find(key)
        if rule is not None and not any(key.startswith(f"{section}.") for section in own):
            own[key] = rule
    run = Translation(dialect, given, {}, num_devices=1)
    for key, rule in own.items():
        *sections, last = key.split(".")
        holder = config
        for name in sections:
            holder = holder[name]
        del holder[last]
        run.apply(key, given[key], rule)
    if run.lost:
        raise invalid_config(f"{entry.key} (ROLL's name): {'; '.join(entry.notes)}" for entry in run.lost)
    notes = [note for entry in run.entries for note in _note(entry, run)]
    return merge_settings(config, run.values, DPOConfig), notes


def _flatten(values: Mapping[Any, Any], prefix: str = "", depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Yield sections and their keys, as deep as ROLL's; a config from Python may contain itself."""
    for name, value in values.items():
        if isinstance(name, str) and "." not in name:
            yield f"{prefix}{name}", value
            if isinstance(value, Mapping) and depth > 1:
                yield from _flatten(value, f"{prefix}{name}.", depth - 1)


def _note(entry: Entry, run: Translation) -> list[str]:
    if entry.outcome == "kept" and entry.targets == [entry.key]:
        return []
    if not entry.targets:
        return [f"{entry.key} has no effect: {'; '.join(entry.notes) or entry.outcome}"]
    target = entry.targets[0]
    leaf = target.rpartition(".")[2]
    ours = redact({leaf: run.value(target)})[leaf]
    if target == entry.key:
        return [f"{entry.key}: {'; '.join(entry.notes) or f'{entry.value} is read as {ours}'}"]
    return [f"{entry.key} is read as {target}: {ours}"]


def _set_ipo(value: Any, run: Translation) -> None:
    run.set("pref_loss", "ipo_sum" if value else "sigmoid")
    if value:
        run.note("ROLL's IPO sums over the tokens; `ipo` averages")


def _set_engine(role: str) -> r.Function:
    def function(value: Any, run: Translation) -> None:
        if value not in _NATIVE and find_declared(value) is not None:
            run.set(f"{role}strategy_args.strategy_name", value)
            return
        sizes = run.get(f"{role}strategy_args.strategy_config") or {}
        is_sharded = any(key in _SIZES and size not in (None, 1) for key, size in sizes.items())
        ours = "fsdp2_train" if role == "actor_train." else "fsdp2_infer" if is_sharded else "hf_infer"
        run.set(f"{role}strategy_args.strategy_name", ours)
        if ours != value:
            run.note("numbers agree up to rounding")

    return function


def _set_strategy(role: str) -> r.Function:
    def function(value: Any, run: Translation) -> None:
        name = run.get(f"{role}strategy_args.strategy_name")
        declared = find_declared(name)
        fp16 = value.get("fp16")  # DeepSpeed's section
        is_used = role == "actor_train." and run.get(f"{MODEL}dtype") in ("fp16", "float16")
        if is_used and isinstance(fp16, dict):
            for setting in fp16.keys() & {"initial_scale_power", "loss_scale_window"}:
                run.set(f"{TRAINING}{setting}", fp16[setting])
        if declared is not None and name not in _NATIVE:
            # validation of the config checks the values of settings that the engine has
            known = {*declared.settings.model_fields, *declared.settings.spellings}
            given = {key: setting for key, setting in value.items() if setting is not None}
            if kept := {key: setting for key, setting in given.items() if key in known}:
                run.set(f"{role}strategy_args.strategy_config", kept)
            _report_left([key for key in given if key not in known], f"{name} has no setting", run)
            return
        target = f"{role}strategy_args.strategy_config."
        for key in value.keys() & _SIZES.keys():
            if value[key] not in (None, 1):
                run.set(f"{target}{_SIZES[key]}", value[key])
        if value.get("reshard_after_forward") is False:
            run.set(f"{target}zero_stage", 2)
        if value.get("offload_policy"):
            run.set(f"{target}cpu_offload", True)
        read = {*_SIZES, "reshard_after_forward", "offload_policy"}
        _report_left([key for key in value if key not in read], "no equivalent of", run)

    return function


def _report_left(left: list[str], problem: str, run: Translation) -> None:
    if unknown := [key for key in left if key not in _ENGINE_ONLY.split()]:
        run.lacks(f"{problem} {', '.join(unknown)}")
    elif left:
        run.note(f"settings without an equivalent, which do not change the numbers: {', '.join(left)}")


def _set_lora(value: Any, run: Translation) -> None:
    run.set(f"{MODEL}lora_target", r.lora_targets(value, run))
    run.set(f"{MODEL}lora_rank", run.get(f"{MODEL}lora_rank", 8))


def _attention(role: str) -> Rule:
    target = f"{role}model_args.attn_implementation"

    def function(value: Any, run: Translation) -> None:
        if name := _ATTENTION.get(value, value):
            run.set(target, name)
        else:
            run.ignore("chosen automatically")

    return r.by(function, target)


def our_keys() -> r.Table:
    """Keys that ROLL and thresher share, and ours that ROLL does not have, for a config that mixes both."""
    keys = [key for key, _ in known_keys(DPOConfig)]
    sections = {key.rpartition(".")[0] for key in keys}
    return {key: r.to(key) for key in keys if key not in sections}


IMPORTED: r.Table = {
    "ipo": r.by(_set_ipo, "pref_loss"),
    "label_smoothing": r.switch("label_smoothing", off="no label smoothing"),
    f"{TRAINING}lr_scheduler_type": r.by(
        lambda value, run: huggingface.set_schedule(_schedule(value, run), run), f"{TRAINING}lr_scheduler_type"
    ),
    f"{TRAINING}warmup_steps": r.by(huggingface.set_warmup_steps, f"{TRAINING}warmup_steps"),
    **{
        f"{role}model_args.dtype": r.choice(f"{role}model_args.dtype", _DTYPES, lacks="there is no dtype {}")
        for role in _ROLES
    },
    **{f"{role}model_args.attn_implementation": _attention(role) for role in _ROLES},
    f"{MODEL}lora_target": r.by(_set_lora, f"{MODEL}lora_target", f"{MODEL}lora_rank"),
    f"{MODEL}lora_rank": r.part_of("lora_target", f"{MODEL}lora_rank"),
    f"{MODEL}additional_target": r.modules_to_save(lambda run: run.get(f"{MODEL}lora_target")),
    f"{MODEL}moe_aux_loss_coef": r.to(f"{MODEL}moe_aux_loss_coef", neutral=(0.0,)),
    f"{MODEL}model_config_kwargs": r.lacks("change the model's config.json"),
    f"{DATA}template": r.choice(f"{DATA}template", _TEMPLATES, lacks=r.NAMED_TEMPLATE),
    **r.drop("not read by ROLL's DPO pipeline; see actor_train.data_args.sources", f"{DATA}domain_interleave_probs"),
    **{
        f"{role}strategy_args.{name}": r.by(make(role), f"{role}strategy_args.{name}")
        for role in _ROLES
        for name, make in (("strategy_name", _set_engine), ("strategy_config", _set_strategy))
    },
    "track_with": r.choice(
        "track_with",
        {name: ["console", name] for name in huggingface.TRACKERS},
        ignore="metrics.jsonl is always written",
    ),
    # not moved: an import does not write a secret
    "tracker_kwargs.api_key": Rule(note="secrets are not written; use `wandb login` or WANDB_API_KEY"),
    "num_gpus_per_node": r.only_if(
        lambda run: run.get("actor_train.device_mapping"), "num_gpus_per_node", "no devices"
    ),
    "resume_from_checkpoint": r.by(huggingface.set_resume, "resume_from_checkpoint"),
}
TABLE: r.Table = {**our_keys(), **READ, **IMPORTED}


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    rate = {f"{TRAINING}learning_rate": 5e-5, f"{TRAINING}lr_scheduler_type": "linear"}
    sizes = {f"{TRAINING}per_device_train_batch_size": 8, f"{TRAINING}num_train_epochs": 1.0}
    others = {"ipo": False, "beta": 0.1, "save_steps": 50, "track_with": "tensorboard"}
    limit = {} if f"{TRAINING}max_steps" in given else {"max_steps": 500}
    is_evaluated = EVAL_FILES in given or f"{DATA}eval_file_name" in given
    evaluation = {"eval_steps": 10} if is_evaluated else {}
    return {**others, **limit, **evaluation, **rate, **sizes, f"{MODEL}disable_gradient_checkpointing": False}
