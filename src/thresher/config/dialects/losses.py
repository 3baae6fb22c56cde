"""Names and parameters of the losses, as TRL and the trainers built on it spell them.

The table repeats the loss registry, which config must not import; a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thresher.config.dialects.rules import Function
    from thresher.config.dialects.translation import Translation

LOSS_PARAMETERS: dict[str, tuple[str, ...]] = {
    "aot": ("beta", "label_smoothing"),
    "aot_unpaired": ("beta", "label_smoothing"),
    "apo_down": ("beta",),
    "apo_zero": ("beta",),
    "bco_pair": ("beta",),
    "cpo": ("beta", "cpo_alpha"),
    "discopop": ("beta", "discopop_tau"),
    "exo_pair": ("beta", "label_smoothing"),
    "hinge": ("beta",),
    "ipo": ("beta",),
    "ipo_sum": ("beta",),
    "nca_pair": ("beta",),
    "orpo": ("beta",),
    "robust": ("beta", "label_smoothing"),
    "sft": (),
    "sigmoid": ("beta", "label_smoothing"),
    "sigmoid_norm": ("beta",),
    "simpo": ("beta", "gamma"),
    "sppo_hard": ("beta",),
}
_TRL_NAMES = {"aot_pair": "aot", "aot_unpair": "aot_unpaired", "kto_pair": None, "bco": "bco_pair"}
# the losses of TRL 1.x that read label_smoothing; its sigmoid ignores it, ours does not
_SMOOTHED = ("aot", "aot_unpaired", "exo_pair", "robust")
_IN_QUANTILES = "TRL sorts the pairs of a micro-batch, here those of the whole step: equal if a step is one micro-batch"
# losses whose numbers differ from TRL's
_DIFFERENT = {
    "aot": _IN_QUANTILES,
    "aot_unpaired": _IN_QUANTILES,
    "bco_pair": "TRL classifies the rewards as they are, here minus their running mean",
    "sft": "TRL averages over all tokens of a micro-batch, here over each response, then over the pairs",
}


def set_losses(weights_key: str, smoothing_key: str = "label_smoothing") -> Function:
    """Make a function that reads a loss or a list of losses, with weights and label smoothing under other keys."""

    def function(value: Any, run: Translation) -> None:
        given = value if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
        names = [_TRL_NAMES.get(name, name) for name in given]
        unknown = [text for text, name in zip(given, names, strict=True) if name not in LOSS_PARAMETERS]
        if unknown:
            return run.lacks(f"there is no loss {', '.join(map(str, unknown))}; `thresher losses` lists the losses")
        weights = run.get(weights_key)
        if isinstance(weights, list) and len(weights) != len(names):
            return run.lacks(
                f"{weights_key} has {len(weights)} weights for {len(names)} losses, which TRL refuses; "
                "give one weight per loss"
            )
        terms: dict[Any, Any] = dict.fromkeys(names, 1.0)
        if isinstance(weights, list):
            terms = dict(zip(names, weights, strict=True))
        smoothing, smoothed = run.get(smoothing_key), set(names) & set(_SMOOTHED)
        if smoothing and smoothed and "sigmoid" in terms:
            terms["sigmoid"] = {"weight": terms["sigmoid"], "label_smoothing": 0.0}
            run.note(f"{smoothing_key} is not for sigmoid, where TRL 1.x ignores it")
        is_single = len(names) == 1 and not isinstance(weights, list)
        run.set("pref_loss", names[0] if is_single else terms)
        if not smoothing and "exo_pair" in smoothed:
            run.differs(f"TRL refuses exo_pair without {smoothing_key}; here its default is 0.001")
        elif "robust" in smoothed and smoothing is None:
            run.set("label_smoothing", 0.0)
            run.note("TRL's default of label_smoothing is 0")
        for name in names:
            if name in _DIFFERENT:
                run.differs(f"{name}: {_DIFFERENT[str(name)]}")
        return None

    return function


def set_label_smoothing(value: Any, run: Translation) -> None:
    """Read label smoothing as TRL 1.x does: its sigmoid ignores it, ours does not."""
    smoothed = set(run.losses) & set(_SMOOTHED)
    if value and not smoothed and "sigmoid" in run.losses:
        run.drop("ignored with sigmoid by TRL 1.x, so it is left out; set label_smoothing for cDPO")
    elif value or ("robust" in smoothed and "exo_pair" not in smoothed):
        run.set("label_smoothing", value)
    else:
        run.ignore("no label smoothing")


def set_if_loss(target: str, *losses: str) -> Function:
    """Make a function that copies a parameter which only some losses have."""

    def function(value: Any, run: Translation) -> None:
        if set(run.losses) & set(losses):
            run.set(target, value)
        else:
            run.ignore(f"only for {', '.join(losses)}")

    return function


def set_if_positive(target: str) -> Function:
    """Make a function that copies the weight of a term; 0 turns the term off."""

    def function(value: Any, run: Translation) -> None:
        if value:
            run.set(target, value)
        else:
            run.ignore("off")

    return function
