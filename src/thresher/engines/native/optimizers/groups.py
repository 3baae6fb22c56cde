"""Parameter groups: names that `param_groups` and `lora_plus_ratio` match, and the rate and decay of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from thresher.config.roles import ModelArgs, ParameterGroup, TrainingArgs
from thresher.errors import UserError, nearest

_NAMES_SHOWN = 12


def group_rules(training: TrainingArgs, model_args: ModelArgs) -> list[ParameterGroup]:
    """The groups besides the default one; a parameter belongs to the first that matches."""
    rules = list(training.param_groups)
    if model_args.lora_plus_ratio is not None:
        # 2402.12354; B, and the magnitudes of DoRA, as in PEFT's create_loraplus_optimizer
        rules.append(ParameterGroup(match=["lora_[Bm]*"], lr_ratio=model_args.lora_plus_ratio))
    return rules


def parameter_groups(
    named: Mapping[str, nn.Parameter],
    training: TrainingArgs,
    rules: Sequence[ParameterGroup] = (),
    # of the whole parameter, for shards that have lost its shape
    num_dims: Callable[[nn.Parameter], int] = lambda parameter: parameter.ndim,
) -> list[dict[str, Any]]:
    """Two groups per rule and two of the rest, even if empty: every process has the same groups, for any sharding."""
    matched: dict[str, int] = {name: _first_match(name, rules) for name in named}
    groups = []
    for at, rule in enumerate([*rules, ParameterGroup.model_construct()]):
        members = [parameter for name, parameter in named.items() if matched[name] == at]
        ratio = rule.lr / training.learning_rate if rule.lr is not None else rule.lr_ratio
        # norms and biases are not decayed, as is usual
        for is_matrix, decay in ((True, training.weight_decay), (False, 0.0)):
            groups.append(
                {
                    "params": [each for each in members if (num_dims(each) >= 2) == is_matrix],
                    "weight_decay": decay if rule.weight_decay is None else rule.weight_decay,
                    "lr_ratio": 1.0 if ratio is None else ratio,
                }
            )
    return groups


def check_groups_match(training: TrainingArgs, model_args: ModelArgs, names: Iterable[str]) -> None:
    """Reject a group without parameters, and a name that matches none. names: of all trained parameters."""
    rules, names = group_rules(training, model_args), list(names)
    filled = {_first_match(name, rules) for name in names}
    for at, rule in enumerate(rules):
        setting = "param_groups" if at < len(training.param_groups) else "lora_plus_ratio"
        for pattern in rule.match:
            if not any(_matches(pattern, name) for name in names):
                raise UserError(f"{setting}: {pattern} matches no trained parameter; {_near(pattern, names)}")
        if at not in filled:
            raise UserError(
                f"{setting}: {', '.join(rule.match)} matches only parameters that are in groups before it; remove one "
                "of them"
            )


def _first_match(name: str, rules: Sequence[ParameterGroup]) -> int:
    fits = (at for at, rule in enumerate(rules) if any(_matches(pattern, name) for pattern in rule.match))
    return next(fits, len(rules))


def _matches(pattern: str, name: str) -> bool:
    """Whether whole parts of a name match, so `layers.1` is not `layers.10`; `*` stands for any characters."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def _near(pattern: str, names: Sequence[str]) -> str:
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    if meant := nearest(pattern.rpartition(".")[2], parts):
        return f"did you mean {meant}?"
    # of all layers at once
    shown = list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in n.split(".")) for n in names))
    more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
    return f"trained are {', '.join(shown[:_NAMES_SHOWN])}{more}"
