"""LoRA adapters: read from disk, attached with PEFT, disabled for the reference, merged for export."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from thresher.distributed.tensors import local_slices, to_local
from thresher.errors import UserError
from thresher.models.loading.load_sharded import copy_shard, retie
from thresher.models.loading.quantization import import_peft, quantized_modules
from thresher.models.loading.weight_files import find_file, is_of_adapter, missing_tensor, open_safetensors
from thresher.models.pipeline_chunk import head_of

_ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# settings of LoRA that change what an adapter computes, and are applied
APPLIED = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "target_parameters"),
)
# applied too; stored only if they are set, so that the digests of older adapters stay the same
_APPLIED_IF_SET = ("use_dora", "modules_to_save", "ensure_weight_tying")
# settings that change what an adapter computes, and are not applied
_NOT_APPLIED = (
    *("trainable_token_indices", "layer_replication", "lora_bias"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
    "velora_config",
)


@dataclass(frozen=True)
class AdapterFiles:
    """A PEFT LoRA adapter on disk, whose tensors are read whole or in slices."""

    path: str
    settings: Mapping[str, Any]  # what is applied, as far as its config has it
    weights: Path

    @classmethod
    def find(cls, path: str) -> AdapterFiles:
        """Find an adapter in a directory or on the Hub; reject one that is not plain LoRA in safetensors."""
        config, weights = find_file(path, CONFIG), find_file(path, WEIGHTS)
        if config is None or weights is None:
            raise UserError(
                f"{path} is not a LoRA adapter: it has no {CONFIG if config is None else WEIGHTS}; give a directory "
                "that PEFT's save_pretrained wrote"
            )
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
            kind, starts = values["peft_type"], values.get("init_lora_weights", True)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{config} cannot be read ({error!r}); copy or download the adapter again") from error
        unsupported = [name for name in _NOT_APPLIED if values.get(name)]
        if kind != "LORA" or unsupported or values.get("bias", "none") != "none":
            what = ", ".join(unsupported) or (f"bias {values['bias']}" if kind == "LORA" else f"type {kind}")
            raise UserError(
                f"the adapter {path} has {what}, which is not supported; merge it into the model with PEFT's "
                "merge_and_unload and train a new adapter"
            )
        if not isinstance(starts, bool) and starts != "gaussian":
            raise UserError(
                f"the adapter {path} was initialized with {starts}, which changed the base weights; merge it with "
                "PEFT, or convert it with path_initial_model_for_weight_conversion of save_pretrained"
            )
        settings = {name: values[name] for name in APPLIED if values.get(name) is not None}
        settings |= {name: values[name] for name in _APPLIED_IF_SET if values.get(name)}
        return cls(path, settings, weights)

    @property
    def use_dora(self) -> bool:
        return bool(self.settings.get("use_dora"))

    @property
    def modules_to_save(self) -> Sequence[str]:
        return self.settings.get("modules_to_save") or ()

    def check_settings(self, *, rank: int | None, alpha: float | None, target: Sequence[str] | None) -> None:
        """Reject run settings that contradict the adapter; None: not set."""
        targets, parameters = self.settings.get("target_modules"), self.settings.get("target_parameters") or []
        if isinstance(targets, list):
            targets = [*targets, *parameters]
        own = {
            "lora_rank": (rank, self.settings.get("r")),
            "lora_alpha": (alpha, self.settings.get("lora_alpha")),
            "lora_target": (
                None if target is None else sorted(target),
                sorted(targets) if isinstance(targets, list) else targets,
            ),
        }
        for name, (given, stored) in own.items():
            if given is not None and given != stored:
                raise UserError(
                    f"{name} is {given}, but the adapter {self.path} has {stored}; remove {name}, which is read from "
                    "the adapter"
                )

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Copy this process's shard of every tensor; the adapter must have exactly the model's tensors."""
        # tied ones are stored under each of their names
        named = model.named_parameters(remove_duplicate=False)
        parameters = {name: parameter for name, parameter in named if is_of_adapter(name)}
        for name, stored in self.tensors(parameters).items():
            copy_shard(stored, parameters[name], self.path, _stored_name(name))

    def tensors(self, names: Iterable[str]) -> dict[str, Any]:
        """Open the tensors of a model's adapter, to be read in slices; the file must have exactly these."""
        file = open_safetensors(self.weights)
        unread = set(file.keys())
        found = {}
        for name in names:
            stored = _stored_name(name)
            if stored not in unread:
                raise missing_tensor(self.path, stored)
            unread.remove(stored)
            found[name] = file.get_slice(stored)
        if unread:
            raise UserError(
                f"the adapter {self.path} has a tensor {min(unread)}, which the model has not; use the model that the "
                "adapter was trained on"
            )
        return found


def _stored_name(name: str) -> str:
    for part in (".modules_to_save.default", ".default"):
        name = name.replace(part, "")
    return f"base_model.model.{name.replace('.lora_magnitude_vector.weight', '.lora_magnitude_vector')}"


@dataclass(frozen=True)
class LoraSettings:
    """A new adapter."""

    rank: int
    alpha: float | None  # None: twice the rank
    target: Sequence[str]
    # `pissa` or `pissa_niter_N` moves the principal components of the weights into the adapters (2404.02948), `olora`
    # a part of their QR decomposition (2406.01775); the same weights give the same parts, so a checkpoint of the
    # adapters needs no copy of the rest
    init: str = "default"
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: Sequence[str] = ()
    exclude: Sequence[str] = ()

    @property
    def starts_from_weights(self) -> bool:
        """Whether the adapter starts with a part of the weights (PiSSA, OLoRA), which the base model then lacks."""
        return self.init != "default"


def attach_lora(model: PreTrainedModel, lora: LoraSettings, *, dropout: float) -> nn.Module:
    """Freeze a model and add trainable adapters; `init_adapters` sets their values."""
    target = list(lora.target)
    modules = [each for each in target if _is_end_of_a_name(each, model.named_modules())]
    # matrices that belong to no linear module: stacked experts
    parameters = [each for each in target if each not in modules and _is_end_of_a_name(each, model.named_parameters())]
    # PEFT is content if one target matches; another, misspelled one would be left untrained
    if unmatched := [each for each in target if each not in (*modules, *parameters, _ALL_LINEAR)]:
        raise UserError(_matches_nothing(model, unmatched))
    if _ALL_LINEAR in target and modules:
        raise UserError(
            f"lora_target all-linear leaves {modules[0]} as it is, or has it already; name all modules instead of "
            f"all-linear, or remove {modules[0]}"
        )
    _check_dropout(parameters, dropout)
    if parameters and lora.starts_from_weights:
        raise UserError(f"lora_init {lora.init} cannot decompose {parameters[0]}; use the default, or remove the name")
    for name, ends, whole in (("lora_exclude", lora.exclude, True), ("modules_to_save", lora.modules_to_save, False)):
        # as PEFT matches them
        if unmatched := [end for end in ends if not _is_end_of_a_name(end, model.named_modules(), whole=whole)]:
            raise UserError(f"{name} {unmatched} matches no module of this model; correct the name, or remove it")
    _check_dense(model, lora.modules_to_save)
    config = import_peft().LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=dropout,
        target_modules=_ALL_LINEAR if _ALL_LINEAR in target else modules,
        target_parameters=parameters or None,
        task_type=None if hasattr(model, "score") else "CAUSAL_LM",
        exclude_modules=[*lora.exclude, *(["score"] if hasattr(model, "score") else [])] or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        modules_to_save=list(lora.modules_to_save) or None,
        ensure_weight_tying=_ties(model, lora.modules_to_save),
        init_lora_weights=lora.init if lora.starts_from_weights and not next(model.parameters()).is_meta else True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for pissa_niter_N, which draws a random subspace
        adapted = _attach(model, config, target)
    adapters = [name for name, module in adapted.named_modules() if hasattr(module, "lora_A")]
    for key in (*lora.rank_pattern, *lora.alpha_pattern):
        if not any(re.match(rf"(.*\.)?({key})$", name) for name in adapters):
            raise UserError(
                f"the key {key} of lora_rank_pattern or lora_alpha_pattern matches no adapter; correct or remove it"
            )
    return adapted


def _ties(model: PreTrainedModel, modules_to_save: Sequence[str]) -> bool:
    """Whether modules that are trained whole share their matrix, which then stays shared."""
    ends = {each: each.weight for each in (model.get_input_embeddings(), head_of(model))}
    named = [name for name, module in model.named_modules() if module in ends]
    is_tied = len(ends) == 2 and len(set(ends.values())) == 1
    return is_tied and any(name.endswith(end) for name in named for end in modules_to_save)


def _check_dense(model: nn.Module, modules_to_save: Sequence[str]) -> None:
    """Reject quantized modules that would be trained whole."""
    chosen = [(name, each) for name, each in model.named_modules() if name.endswith(tuple(modules_to_save))]
    if packed := [name for name, each in chosen if quantized_modules(each)]:
        raise UserError(
            f"modules_to_save {list(modules_to_save)} contains {packed[0]}, which quantization stores in few bits; it "
            "cannot be trained, so remove it"
        )


def _check_dropout(parameters: Sequence[str], dropout: float) -> None:
    if parameters and dropout:
        raise UserError(f"lora_dropout is {dropout}, which {parameters[0]} cannot have; set it to 0")


def _is_end_of_a_name(end: str, named: Iterable[tuple[str, Any]], *, whole: bool = True) -> bool:
    """whole: of a name between dots, such as `proj` is not of `q_proj`."""
    return any(f".{name}".endswith(f".{end}" if whole else end) for name, _ in named)


def attach_adapter(model: PreTrainedModel, adapter: AdapterFiles, *, dropout: float = 0.0) -> nn.Module:
    """Freeze a model and add the trainable modules of an adapter on disk; `AdapterFiles.load` sets their values."""
    _check_dropout(adapter.settings.get("target_parameters") or (), dropout)
    _check_dense(model, adapter.modules_to_save)
    settings = copy.deepcopy(dict(adapter.settings))  # PEFT appends to lists
    if _ties(model, adapter.modules_to_save) and not settings.get("ensure_weight_tying"):
        raise UserError(
            f"the adapter {adapter.path} trains embedding and head of a model that ties them apart from each other; "
            "merge it into the model with PEFT's merge_and_unload and train a new adapter"
        )
    config = import_peft().LoraConfig(
        **settings, lora_dropout=dropout, task_type=None if hasattr(model, "score") else "CAUSAL_LM"
    )
    return _attach(model, config, [str(adapter.settings.get("target_modules"))])


def _attach(model: PreTrainedModel, config: Any, target: Sequence[str]) -> nn.Module:
    try:
        is_on_meta = next(model.parameters()).is_meta
        with warnings.catch_warnings():  # PEFT adds patterns for experts as modules, which may then match nothing
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            adapted: nn.Module = import_peft().get_peft_model(model, config, low_cpu_mem_usage=is_on_meta)
    except TypeError as error:  # of a module that is trained whole
        raise UserError(f"modules_to_save {config.modules_to_save} is not possible: {error}; name others") from error
    except ValueError as error:
        if config.use_dora and config.target_parameters:
            raise UserError(
                f"use_dora does not support the stacked experts {', '.join(config.target_parameters)}; name the other "
                "modules in lora_target"
            ) from error
        if "excluded" in str(error):
            raise UserError(
                f"lora_exclude and modules_to_save leave nothing of lora_target {list(target)}; remove one of them"
            ) from error
        if "incompatible" in str(error):  # kernels of Mamba layers would leave out an adapter on `out_proj`
            raise UserError(f"lora_target {list(target)} is not possible: {error}") from error
        raise UserError(_matches_nothing(model, target)) from error
    # logps use the head's weight directly, so an adapter on it would never be trained
    if any("lora_" in name for name, _ in head_of(model).named_parameters()):
        raise UserError(f"lora_target {list(target)} matches the LM head, which cannot have an adapter; exclude it")
    named: list[tuple[str, Any]] = list(adapted.named_modules())
    for name, module in named:
        if hasattr(module, "original_module") and any("lora_" in inner for inner, _ in module.named_parameters()):
            raise UserError(f"{name} is in modules_to_save and has adapters; name it in lora_exclude, or remove it")
        if len(getattr(module, "lora_magnitude_vector", ())):
            if not isinstance(module.base_layer, nn.Linear):
                raise UserError(f"use_dora supports linear modules only, which {name} is not; exclude it")
            module.lora_magnitude_vector["default"].get_weight_norm = _row_norms
    if config.ensure_weight_tying:
        retie(model)
    return adapted


@torch.no_grad()
def _row_norms(weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: object = None) -> Tensor:  # noqa: ARG001
    """Norms of the rows of an adapted matrix, for DoRA (2402.09353), in fp32.

    PEFT rounds them to the dtype of the weights. In bf16 they would not cancel the magnitudes of a new adapter.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(weight.to(dtype) + scaling * lora_weight.to(dtype), dim=1)
    return norms


def default_lora_target(model_type: str) -> list[str]:
    """The modules that PEFT gives adapters in a family of models if none are named."""
    defaults = import_peft().utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if model_type not in defaults:
        raise UserError(f"PEFT has no default target_modules for {model_type} models; name them, or use all-linear")
    return list(defaults[model_type])


def _matches_nothing(model: nn.Module, target: Sequence[str]) -> str:
    linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
    return f"lora_target {list(target)} matches nothing in this model; its linear modules are {', '.join(linear)}"


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int, *, keeps_factors: bool = False) -> None:
    """Initialize adapters; the initial output equals the base model's. keeps_factors: they have their values."""
    # each tensor's generator is seeded by its name, so values do not depend on how the model is sharded
    for name, parameter in model.named_parameters():
        if ".lora_" in name and ".lora_magnitude_vector." not in name and not keeps_factors:
            to_local(parameter).copy_(initial_values(name, parameter.shape, seed)[local_slices(parameter)])
    modules: list[Any] = list(model.modules())
    for module in modules:
        if len(getattr(module, "lora_magnitude_vector", ())):
            # both shards have the same rows
            magnitudes, weight = module.lora_magnitude_vector["default"].weight, to_local(module.base_layer.weight)
            to_local(magnitudes).copy_(_row_norms(weight, weight.new_zeros(()), 1.0))
        if hasattr(module, "original_module"):
            original = module.original_module.parameters()
            for copied, initial in zip(module.modules_to_save.parameters(), original, strict=True):
                to_local(copied).copy_(to_local(initial))


def initial_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Initial values of an adapter's full tensor, by its name in the transformers model."""
    # one factor is zero: B, but A of an embedding, as in PEFT
    if ".lora_B." in name or ".lora_embedding_A." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    # uniform in +-1/sqrt(inputs), as PEFT draws A; it draws B of an embedding from N(0, 1), whatever its width
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def adapter_disabled(model: Any) -> AbstractContextManager[None]:
    """Use the exact base model within a `with` block."""
    context: AbstractContextManager[None] = model.disable_adapter()
    return context


def merge_adapter(model: Any) -> PreTrainedModel:
    """Merge the adapters into the base weights; an LM head that is tied to an adapted embedding becomes untied."""
    base: Any = model.get_base_model()
    embedding, head = base.get_input_embeddings(), head_of(base)
    is_adapted = any("lora_" in name for name, _ in embedding.named_parameters())
    if is_adapted and embedding.weight is head.weight:
        # the adapter changes the embedding only; merged into the shared weight, it would change the head too
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        base.config.get_text_config().tie_word_embeddings = base.config.tie_word_embeddings = False
    merged: PreTrainedModel = model.merge_and_unload()
    return merged
