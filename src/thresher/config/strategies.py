"""Strategies by name: each is an entry point of the group `thresher.strategies`, of this package or of another one.

An entry point names a `StrategyDeclaration`. Reading it imports neither torch nor the engine, so that configs are
validated within milliseconds; the functions that it names are imported when a model is checked or built.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal

from pydantic import JsonValue, ValidationError, ValidationInfo, field_validator, model_validator

from thresher.config.section import Section
from thresher.errors import UserError, nearest
from thresher.imported_function import find_entry_points
from thresher.optional import require

GROUP = "thresher.strategies"
DEFAULT_TRAIN, DEFAULT_INFER = "fsdp2_train", "hf_infer"
_SERVERS = ("vllm", "sglang")  # strategies of other trainers
# of a model: its layers, or their elementwise functions one by one
CompiledParts = Literal["layers", "functions"]


class StrategySettings(Section):
    """Base of a strategy's section `strategy_config`. The default is one model per worker, without settings."""

    spellings: ClassVar[Mapping[str, str]] = {}  # other accepted names of its keys

    @model_validator(mode="before")
    @classmethod
    def _resolve_spellings(cls, values: Any) -> Any:
        return cls.canonical(values) if isinstance(values, dict) else values

    @classmethod
    def canonical(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values under the names of the fields."""
        named: dict[str, Any] = {}
        for given, value in values.items():
            name = cls.spellings.get(given, given)
            if name in named or (name != given and name in values):
                raise ValueError(f"{given} and {name} are the same setting; keep one")
            named[name] = value
        return named

    @property
    def workers_per_data_rank(self) -> int:
        """Workers that form one data-parallel rank, because each computes a part of the same pairs."""
        return 1

    @property
    def splits_rows(self) -> bool:
        """Whether workers compute parts of a row (context parallelism), which needs packed rows."""
        return False

    @property
    def compiled_parts(self) -> CompiledParts | None:
        """What `torch_compile` compiles; None: nothing."""
        return None

    def is_replicated(self, num_workers: int) -> bool:  # noqa: ARG002
        """Whether every worker has the whole model and runs without the others."""
        return True

    def check_workers(self, num_workers: int) -> None:
        """Raise ValueError if these settings do not fit a number of workers."""

    def fit(self, num_workers: int, available: int) -> tuple[int, dict[str, JsonValue]]:  # noqa: ARG002
        """Return the most workers that an elastic run can use of fewer than num_workers, and settings to change."""
        return available // self.workers_per_data_rank * self.workers_per_data_rank, {}


def not_a_multiple(num_workers: int, product: int, factors: list[str]) -> str:
    """Say that workers cannot be divided among the mesh dimensions, and which numbers of workers can."""
    divisor = " x ".join(factors) + (f" = {product}" if len(factors) > 1 else "")
    nearest = [count for count in (num_workers // product * product, (num_workers // product + 1) * product) if count]
    return (
        f"has {num_workers} worker{'s' if num_workers > 1 else ''}, which is not a multiple of {divisor}; use "
        f"{' or '.join(map(str, nearest))} workers (device_mapping, or num_workers on CPUs), or smaller parallel sizes"
    )


@dataclass(frozen=True)
class StrategyDeclaration:
    """A strategy: its settings, its functions as `package.module:function`, and what it supports.

    The types that the functions take and return are in `thresher.engines`.
    """

    settings: type[StrategySettings]
    # all functions take a ModelSpec
    build_infer: str  # returns an Engine, which also serves a reference on the policy's mesh
    build_train: str | None = None  # returns a TrainEngine; None for a strategy that only scores
    # raises a UserError for an unsupported model or settings, before any worker starts and without
    # importing the engine
    check: str | None = None
    install: str | None = None  # the command that installs `modules`
    modules: tuple[str, ...] = ()  # what must be importable
    needs_gpu: bool = False  # whether each worker needs one
    layouts: tuple[str, ...] = ("shared", "packed", "padded")
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    adapters: bool = True
    reward_models: bool = True
    quantization: bool = False  # whether frozen matrices may have 4 or 8 bits

    def check_installed(self, name: str) -> None:
        """Raise if the engine is not installed; nothing is imported."""
        require(f"strategy_name {name}", *self.modules, command=self.install or "")


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return find_entry_points(GROUP, "strategy")


@cache
def find_strategy(name: str) -> StrategyDeclaration:
    """Return the declaration of a strategy; ValueError if no installed package has one of this name."""
    found = _entry_points()
    if not found:
        raise UserError("no strategy is installed, not even thresher's; install thresher with pip")
    if name not in found:
        meant = nearest(name, found)
        hint = f"did you mean {meant}?" if meant else f"installed are {', '.join(sorted(found))}"
        if name in _SERVERS:
            hint = (
                "it serves text, and a reference is scored by hf_infer, fsdp2_infer, deepspeed_infer or megatron_infer"
            )
        raise ValueError(f"there is no strategy {name}; {hint}")
    try:
        declaration: StrategyDeclaration = found[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the strategy {name} cannot be loaded from {found[name].value}: {error}") from error
    return declaration


def strategy_names(role: Literal["train", "infer"]) -> list[str]:
    """Return the names of the strategies of a role, without those that cannot be loaded."""
    names = []
    for name in sorted(_entry_points()):
        with suppress(ValueError):
            if (find_strategy(name).build_train is not None) == (role == "train"):
                names.append(name)
    return names


class StrategyArgs(Section):
    """Training or inference engine of a role."""

    strategy_name: str | None = None
    """fsdp2_train (the default), deepspeed_train or megatron_train for the policy; hf_infer, fsdp2_infer,
    deepspeed_infer or megatron_infer for the reference; or another installed package's. A reference without engine,
    num_workers and device_mapping runs in the policy's workers if it is the same model or has sync_steps, or under
    torchrun, otherwise with hf_infer."""
    strategy_config: dict[str, JsonValue] = {}
    """Engine settings, see below."""

    @field_validator("strategy_name")
    @classmethod
    def _validate_name(cls, name: str | None) -> str | None:
        if name is not None:
            find_strategy(name)
        return name

    @field_validator("strategy_config", mode="before")
    @classmethod
    def _resolve_names(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict) or "strategy_name" not in info.data:
            return value
        return _declaration(info.data["strategy_name"]).settings.canonical(value)

    @model_validator(mode="after")
    def _validate_settings(self) -> StrategyArgs:
        known = self.declaration.settings.model_fields
        unknown = sorted(self.strategy_config.keys() - known.keys())
        if unknown and known:
            raise ValueError(f"strategy_config has no key {', '.join(unknown)}; known: {', '.join(known)}")
        try:
            _ = self.settings
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, ("strategy_config", *problem["loc"])))
            raise ValueError(f"{key}: {problem['msg'].removeprefix('Value error, ')}") from None
        return self

    @property
    def declaration(self) -> StrategyDeclaration:
        return _declaration(self.strategy_name)

    @property
    def settings(self) -> Any:
        """The validated settings of the engine, of the class that it declares."""
        return self.declaration.settings.model_validate(self.strategy_config)


def _declaration(name: str | None) -> StrategyDeclaration:
    return find_strategy(name or DEFAULT_TRAIN)
