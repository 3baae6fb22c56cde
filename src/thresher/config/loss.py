"""The objective as settings: losses with weights and parameters, and their modifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, model_validator

from thresher.config.section import Section
from thresher.imported_function import digest_of

# Parameters of the losses; None leaves the default of the loss.
LOSS_PARAMETERS = (
    *("beta", "label_smoothing", "gamma", "cpo_alpha", "alphapo_alpha", "discopop_tau", "dpop_lambda"),
    *("desirable_weight", "undesirable_weight", "infonca_alpha", "reward_scale", "center_rewards_coefficient"),
)
# the loss of a switch; `ipo: true` next to pref_loss: ipo was the averaged loss before it became ROLL's
_SWITCHES = {"ipo": ("ipo_sum", "ipo"), "simpo_loss": ("simpo",)}
# names of losses in TRL, ColossalChat and open-instruct; a config keeps ours
LOSS_NAMES = {
    "dpo": "sigmoid",
    "dpo_loss": "sigmoid",
    "dpo_norm": "sigmoid_norm",
    "simpo_loss": "simpo",
    "orpo_loss": "orpo",
    "aot_pair": "aot",
}
Positive = Annotated[float, Field(gt=0)]


def _check_weight(term: dict[str, float]) -> dict[str, float]:
    if term.get("weight", 1.0) <= 0:
        raise ValueError("weight must be above 0")
    return term


LossTerm = Annotated[dict[str, float], AfterValidator(_check_weight)]


class LossConfig(Section):
    """The objective. A parameter left out takes the default of the chosen loss (`thresher losses` lists them)."""

    pref_loss: str | list[str] | dict[str, Positive | LossTerm] = "sigmoid"
    """Name of a loss, a list of names, or a mapping from name to weight (MPO), or to `weight` and parameters:
    `{sigmoid: 0.8, robust: {weight: 0.2, label_smoothing: 0.1}}`. `dpo` means sigmoid. For your own loss,
    path/to/file.py:function or package.module:function; see docs/concepts/losses.md."""
    pref_loss_digests: dict[str, str] = {}
    """Recorded, not to be set: SHA-256 of each Python file in pref_loss, which a resumed run compares."""
    ipo: StrictBool | None = None
    """`true` means pref_loss=ipo_sum, as in ROLL; pref_loss=ipo averages over tokens."""
    simpo_loss: StrictBool | None = None
    """`true` means pref_loss=simpo."""
    beta: Positive | None = None
    """DPO temperature: larger values keep the policy closer to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Assumed probability that a label is flipped, up to 0.5 in built-in losses."""
    gamma: float | None = None
    """Target reward margin: gamma of SimPO and AlphaPO, or subtracted from the reward margin of another loss that
    supports it."""
    length_normalization: bool | None = None
    """Average log-probabilities over the response: `true` turns sigmoid into sigmoid_norm and ipo_sum into ipo, `false`
    turns ipo into ipo_sum."""
    cpo_alpha: Annotated[float, Field(ge=0)] | None = None
    """CPO: weight of the NLL term."""
    alphapo_alpha: float | None = None
    """AlphaPO: exponent of the reward; 0 gives SimPO."""
    discopop_tau: Positive | None = None
    """DiscoPOP: temperature of the gate, at most 1."""
    desirable_weight: Positive | None = None
    """KTO: weight of desirable responses; `thresher prepare` prints the advised range for the data's labels."""
    undesirable_weight: Positive | None = None
    """KTO: weight of undesirable responses."""
    infonca_alpha: Positive | None = None
    """InfoNCA: temperature of the scores."""
    reward_scale: Positive | None = None
    """rpo_sq, rpo_bwd_kl and rpo_fwd_kl: times the difference of the scores."""
    center_rewards_coefficient: Annotated[float, Field(ge=0)] | None = None
    """Reward models: weight of a term that keeps the mean reward near 0, such as 0.01."""
    comparisons: Literal["all", "adjacent", "best_worst", "best_rest"] = "all"
    """The pairs that a pairwise loss reads from a list of responses: all of different score or rank, neighbors in the
    ranking, the best with the worst, or the best with each other one. A prompt's comparisons are averaged."""
    dpop_lambda: Annotated[float, Field(ge=0)] | None = None
    """DPOP: weight of the loss in likelihood of the chosen response."""
    rpo_alpha: Positive | None = None
    """RPO: weight of an added NLL term on the chosen response."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """f-DPO: divergence between policy and reference."""
    f_alpha_divergence_coef: float = 0.5
    """f-DPO: alpha of alpha_divergence; 0 gives forward KL, 1 reverse KL."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """LD-DPO: weight of the tokens beyond the shorter response's length."""
    clamp_log_ratio: tuple[float, float] | None = None
    """Humanline: bounds to which each token's log ratio is clamped, such as [-1, 1.5]; with reference.sync_steps."""
    use_wpo: bool = False
    """WPO: weight each pair by its likelihood relative to the policy's samples."""
    length_penalty: Annotated[float, Field(ge=0)] | None = None
    """R-DPO: times chosen minus rejected length, added to the reward margin."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_loss_aliases(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if "pref_loss" in values:
            return {**values, "pref_loss": _our_names(values["pref_loss"])}
        named = [names[0] for switch, names in _SWITCHES.items() if values.get(switch) is True]
        return {**values, "pref_loss": named[0]} if named else values

    @model_validator(mode="after")
    def _validate_loss(self) -> LossConfig:
        if self.ipo and self.simpo_loss:
            raise ValueError("ipo and simpo_loss are both true; keep one")
        for switch, names in _SWITCHES.items():
            if getattr(self, switch) and self.pref_loss not in [*names, *([name] for name in names)]:
                raise ValueError(f"{switch}: true contradicts pref_loss: {self.pref_loss}; keep one")
        terms = [name for name, _ in self._terms]
        if len(set(terms)) != len(terms):
            raise ValueError(f"pref_loss repeats a loss: {' + '.join(terms)}; name each loss once, with its weight")
        if self.non_default("f_alpha_divergence_coef") and self.f_divergence_type != "alpha_divergence":
            raise ValueError("f_alpha_divergence_coef has no effect without f_divergence_type=alpha_divergence")
        return self

    @property
    def loss_weights(self) -> dict[str, float]:
        """Loss names with their weights, aliases resolved."""
        return dict(self._terms)

    @property
    def _terms(self) -> list[tuple[str, float]]:
        names = [self.pref_loss] if isinstance(self.pref_loss, str) else self.pref_loss
        terms = names if isinstance(names, dict) else {}
        weights = {name: term.get("weight", 1.0) if isinstance(term, dict) else term for name, term in terms.items()}
        return [(self._normalised_name(name), weights.get(name, 1.0)) for name in names]

    def _normalised_name(self, name: str) -> str:
        renamed = {("sigmoid", True): "sigmoid_norm", ("ipo", False): "ipo_sum", ("ipo_sum", True): "ipo"}
        return renamed.get((name, self.length_normalization), name) if self.length_normalization is not None else name

    @property
    def term_parameters(self) -> dict[str, dict[str, float]]:
        """Parameters that pref_loss sets for one loss, by its name; they take precedence over given_parameters."""
        terms = self.pref_loss.items() if isinstance(self.pref_loss, dict) else ()
        return {
            self._normalised_name(name): {key: value for key, value in term.items() if key != "weight"}
            for name, term in terms
            if isinstance(term, dict)
        }

    @property
    def given_parameters(self) -> dict[str, float]:
        """Loss parameters that the user set for all losses."""
        return {name: getattr(self, name) for name in LOSS_PARAMETERS if getattr(self, name) is not None}


def _our_names(given: Any) -> Any:
    """Return a loss name, a list of names or a mapping of names to weights under our names."""
    if isinstance(given, list):
        return [_our_names(name) for name in given]
    if not isinstance(given, dict):
        return LOSS_NAMES.get(given, given) if isinstance(given, str) else given
    named = {_our_names(name): weight for name, weight in given.items()}
    if len(named) < len(given):
        raise ValueError(f"pref_loss names a loss twice: {' + '.join(map(str, given))}; name each loss once")
    return named


def with_digests(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values with the digest of each Python file that pref_loss names."""
    given = values.get("pref_loss")
    names = [given] if isinstance(given, str) else given if isinstance(given, (list, Mapping)) else []
    files = {name: digest_of(name) for name in names if isinstance(name, str) and ".py:" in name}
    found = {name: digest for name, digest in files.items() if digest is not None}
    kept = {name: value for name, value in values.items() if name != "pref_loss_digests"}
    return {**kept, "pref_loss_digests": found} if found else kept
