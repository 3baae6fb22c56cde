"""The rules: each is a pure function of the records so far that returns the numbers that prove its condition.

A limit is at least four standard errors of what it is compared with, in a window of history.py, so the noise of a
healthy run does not reach it. A rule whose metric a run does not have, such as `kl` without a reference, returns None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from statistics import NormalDist, median

from thresher.observability.health.history import KEPT_PAIRS, KEPT_RECORDS, SAMPLED, VALIDATED, History, Window

Evidence = Mapping[str, float]

# with the name of a rule, the metric that marks its events
METRIC_PREFIX = "health/"

# nats per token: the probability of a chosen token fell by a quarter
NLL_RISE = 0.3
# the policy prefers the longer (shorter) response in this many more pairs than the data does, and clearly not at random
LENGTH_EXCESS, LENGTH_PREFERENCE = 0.15, 0.65
LENGTH_PAIRS = 512
# nats per token: the probability of a token changed by a factor of 4.5
KL_PER_TOKEN = 1.5
# share of the entropy of the first window
ENTROPY_SHARE = 0.5
# the value of a logistic loss is then the weight of its gradient, so steps hardly change the policy
SATURATED_ACCURACY, SATURATED_LOSS_SHARE = 0.99, 0.05
# at 1,024 pairs the standard error is 0.016: an accuracy of 0.6, low for a run that learns, is 5 of them away
CHANCE_ACCURACY, CHANCE_PAIRS = 0.52, KEPT_PAIRS
# share of the run before which a learning rate may still be warming up
CHANCE_FROM = 0.2
# relative to max(1, its size): rounding of bf16 stays below a tenth of this
INITIAL_LOSS_OFF = 0.05
# a spike: this factor above the median of the last records, and above the largest norm of the first ones
SPIKE_FACTOR, SPIKE_RECORDS, SPIKE_START_RECORDS, SPIKE_START_FACTOR = 10.0, KEPT_RECORDS, 10, 2.0
# clipping absorbs a single spike
NUM_SPIKES = 3
DUPLICATE_SHARE = 0.05
# excess of repeated phrases in the policy's answers over the reference's: a third of what it says
REPETITION_EXCESS = 0.3
# standard errors by which validation must differ from what training shows
NUM_STANDARD_ERRORS = 4.0
# share of the first validation loss by which it must exceed its minimum, however many pairs it is the mean of
OVERFITTING_RISE = 0.1
# of a normal distribution, the share of pairs with a positive margin if its mean is one standard deviation
MAX_INFORMATIVE_ACCURACY = 0.84


Check = Callable[[History], Evidence | None]


@dataclass(frozen=True)
class Rule:
    """A named condition."""

    name: str
    summary: str  # what happened
    changes: tuple[str, ...]  # any of them may help, in config keys
    # returns the numbers that prove the condition while it holds; the history is empty before the first step
    check: Check

    def advice(self, refused: Set[str] = frozenset()) -> str:
        """What to change, without the settings that the run's losses refuse."""
        changes = [change for change in self.changes if not refused & set(re.findall(r"\w+", change))]
        *others, last = changes
        return last if not others else f"{', '.join(others)}{',' * (len(others) > 1)} or {last}"


RULES: list[Rule] = []
_LR = "actor_train.training_args.learning_rate"


def _rule(summary: str, *changes: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(check.__name__, summary, changes, check))
        return check

    return register


def _tokens(window: Window) -> float:
    """Mean length of a response, over both sides, or those that a window has."""
    lengths = [each for each in map(window.mean, ("lengths/chosen", "lengths/rejected")) if each is not None]
    return max(1.0, sum(lengths) / max(1, len(lengths)))


def _change(history: History, name: str) -> tuple[float, float] | None:
    """A metric in the first and in the newest window."""
    recent = history.recent()
    if recent is None:
        return None
    before, now = history.first.mean(name), recent.mean(name)
    return None if before is None or now is None else (before, now)


@_rule(
    "the chosen responses become less likely while the margin grows",
    "set rpo_alpha=1",
    "raise desirable_weight",
    f"lower {_LR}",
    "raise beta",
)
def likelihood_displacement(history: History) -> Evidence | None:
    nll, margin = _change(history, "sft_loss"), _change(history, "rewards/margins")
    if not history.compares_sides or nll is None or margin is None:
        return None
    if nll[1] - nll[0] < NLL_RISE or margin[1] <= margin[0]:
        return None
    return {
        "chosen NLL per token at the start": nll[0],
        "chosen NLL per token now": nll[1],
        "margin at the start": margin[0],
        "margin now": margin[1],
    }


@_rule(
    "the policy tells the sides apart by their length",
    "set length_penalty=0.01 (R-DPO)",
    "set ld_alpha=0.5 (LD-DPO)",
    "set length_normalization=true",
    "balance the lengths in the data",
)
def length_exploitation(history: History) -> Evidence | None:
    """The policy prefers the longer, or the shorter, response more often than the data does."""
    window = history.recent(LENGTH_PAIRS)
    if not history.compares_sides or window is None:
        return None
    chosen, preferred = window.mean("lengths/longer_chosen"), window.mean("lengths/longer_preferred")
    if chosen is None or preferred is None:
        return None
    excess, preference = abs(preferred - chosen), max(preferred, 1.0 - preferred)
    goes_beyond = (preferred > chosen) == (preferred > 0.5)
    if excess < LENGTH_EXCESS or preference < LENGTH_PREFERENCE or not goes_beyond:
        return None
    return {"longer response preferred": preferred, "longer response chosen in the data": chosen}


@_rule("the policy is far from its reference", "raise beta", f"lower {_LR}", "train fewer steps (max_steps)")
def large_kl(history: History) -> Evidence | None:
    window = history.recent()
    kl = None if window is None else window.mean("kl")
    if window is None or kl is None or abs(kl) / _tokens(window) < KL_PER_TOKEN:
        return None
    per_token = kl / _tokens(window)
    return {"log ratio per response": kl, "log ratio per token": per_token, "limit per token": KL_PER_TOKEN}


@_rule(
    "the policy's distribution has collapsed, so it will repeat itself",
    f"lower {_LR}",
    "raise beta",
    "set label_smoothing=0.1",
)
def entropy_collapse(history: History) -> Evidence | None:
    entropy = _change(history, "entropy")
    if entropy is None or entropy[1] > ENTROPY_SHARE * entropy[0]:
        return None
    return {"entropy per token at the start": entropy[0], "entropy per token now": entropy[1]}


@_rule(
    "nearly all pairs are separated, and further steps only memorize them",
    "train fewer steps (max_steps)",
    "set label_smoothing=0.1",
    "set pref_loss=ipo",
    "use harder examples",
)
def saturated_rewards(history: History) -> Evidence | None:
    loss, accuracy = _change(history, "loss"), _change(history, "rewards/accuracies")
    if not history.compares_sides or loss is None or accuracy is None:
        return None
    if accuracy[1] < SATURATED_ACCURACY or loss[1] > SATURATED_LOSS_SHARE * loss[0]:
        return None
    margin = _change(history, "rewards/margins")
    margins = {} if margin is None else {"margin": margin[1]}
    return {"accuracy": accuracy[1], "loss at the start": loss[0], "loss now": loss[1], **margins}


@_rule(
    "the policy does not learn which side is preferred",
    f"raise {_LR}, and check with `thresher inspect` that chosen_key and rejected_key name the right columns",
)
def chance_accuracy(history: History) -> Evidence | None:
    window = history.recent(CHANCE_PAIRS)
    if not history.compares_sides or window is None or window.records[0].step < CHANCE_FROM * history.total_steps:
        return None
    accuracy = window.mean("rewards/accuracies")
    if accuracy is None or accuracy > CHANCE_ACCURACY:
        return None
    rate = {"learning rate": window.records[-1].metrics["lr"]} if "lr" in window.records[-1].metrics else {}
    return {"accuracy": accuracy, "pairs": window.num_pairs} | rate


@_rule(
    "the loss does not start at its value for a policy that equals its reference",
    "check that reference.model_args has the settings of actor_train.model_args",
)
def initial_loss(history: History) -> Evidence | None:
    first = history.first.records[:1]
    if history.initial_loss is None or not history.starts_at_reference or not first or first[0].step != 1:
        return None
    loss = first[0].metrics["loss"]
    if abs(loss - history.initial_loss) <= INITIAL_LOSS_OFF * max(1.0, abs(history.initial_loss)):
        return None
    return {"loss of step 1": loss, "expected": history.initial_loss}


@_rule(
    "the gradient norm spikes repeatedly",
    f"lower {_LR}",
    "lower actor_train.training_args.max_grad_norm",
    "raise warmup_ratio",
    "use larger batches",
)
def gradient_spikes(history: History) -> Evidence | None:
    """Several gradient norms stand far above their neighbors and the norms of the start."""
    norms = history.newest("grad_norm", SPIKE_RECORDS)
    start = [each.metrics["grad_norm"] for each in history.first.records if "grad_norm" in each.metrics]
    if not norms or not start:
        return None
    usual = median(norms)
    limit = max(SPIKE_FACTOR * usual, SPIKE_START_FACTOR * max(start[:SPIKE_START_RECORDS]))
    spikes = [norm for norm in norms if norm > limit]
    if len(spikes) < NUM_SPIKES:
        return None
    return {"spikes": len(spikes), "largest gradient norm": max(spikes), "median gradient norm": usual}


@_rule(
    "many training pairs are duplicates, which the policy memorizes",
    "remove them from actor_train.data_args.file_name (`thresher prepare` names examples)",
)
def repeated_data(history: History) -> Evidence | None:
    if history.duplicates < DUPLICATE_SHARE * history.num_training_pairs or not history.duplicates:
        return None
    return {
        "pairs that repeat another": history.duplicates,
        "share of all pairs": history.duplicates / history.num_training_pairs,
    }


@_rule(
    "policy and reference are the same model, but score the first pairs differently",
    "check that reference.model_args and reference.strategy_args have the settings of actor_train",
)
def mismatched_reference(history: History) -> Evidence | None:
    first = history.first.records[:1]
    if not history.starts_at_reference or not first or first[0].step != 1 or "kl" not in first[0].metrics:
        return None
    difference = first[0].metrics["kl"] / _tokens(Window(first))
    if abs(difference) <= history.logp_noise:
        return None
    return {"difference of logps per token": difference, "rounding explains": history.logp_noise}


@_rule(
    "the policy repeats itself in its answers, and the reference does not",
    "set rpo_alpha=1",
    f"lower {_LR}",
    "raise beta",
    "check in the data that responses end with the EOS token",
)
def repetition(history: History) -> Evidence | None:
    policy, reference = history.sampled.get(SAMPLED), history.sampled.get("samples/repetition/reference")
    if policy is None or reference is None or policy - reference < REPETITION_EXCESS:
        return None
    return {"repeated phrases of the policy": policy, "repeated phrases of the reference": reference}


@_rule(
    "the policy prefers the rejected responses of the validation pairs, as if their columns were swapped",
    "compare `thresher inspect` of both files: chosen_key and rejected_key must name the same side in "
    "actor_train.data_args.file_name and validation.data_args.file_name",
)
def validation_below_chance(history: History) -> Evidence | None:
    """Training separates the sides, and accuracy or margin on validation pairs is far below a coin's."""
    validation = history.validation
    if validation is None or not history.compares_sides or not history.num_validation_pairs:
        return None
    names = ("rewards/accuracies", "rewards/margins")
    accuracy, margin = (validation.metrics.get(f"eval/{name}") for name in names)
    trained_accuracy, trained_margin = (validation.training.mean(name) for name in names)
    if accuracy is None or margin is None or trained_accuracy is None or trained_margin is None:
        return None
    # a policy that prefers the rejected side of all pairs, such as one without a reference at its start, may learn yet
    if trained_accuracy < 0.5 + 0.5 * NUM_STANDARD_ERRORS / math.sqrt(validation.training.num_pairs):
        return None
    # margins have no standard deviation in the log: take a normal distribution's, with the accuracy of training
    spread = max(0.0, trained_margin) / NormalDist().inv_cdf(min(trained_accuracy, MAX_INFORMATIVE_ACCURACY))
    standard_errors = NUM_STANDARD_ERRORS / math.sqrt(history.num_validation_pairs)
    is_below = spread > 0 and margin < -spread * standard_errors
    if accuracy >= 0.5 - 0.5 * standard_errors and not is_below:
        return None
    return {
        "validation accuracy": accuracy,
        "training accuracy": trained_accuracy,
        "validation margin": margin,
        "training margin": trained_margin,
        "validation pairs": history.num_validation_pairs,
    }


@_rule(
    "the validation loss rises while the training loss falls",
    "export the best checkpoint (`thresher export --best`)",
    "train fewer steps (max_steps)",
    f"lower {_LR}",
    "use more data",
)
def overfitting(history: History) -> Evidence | None:
    """The validation loss is far above its minimum, and the training loss is below it."""
    validation = history.validation
    trained = None if validation is None else validation.training.mean("loss")
    if validation is None or trained is None or not history.num_validation_pairs:
        return None
    # the loss of a pair changes by about as much as the loss itself
    limit = max(OVERFITTING_RISE, NUM_STANDARD_ERRORS / math.sqrt(history.num_validation_pairs))
    loss, lowest = validation.metrics[VALIDATED], validation.lowest_loss
    if loss - lowest < limit * abs(validation.first_loss) or trained >= lowest:
        return None
    if validation_below_chance(history) is not None:
        return None
    return {
        "validation loss": loss,
        "its minimum": lowest,
        "step of the minimum": validation.lowest_step,
        "training loss": trained,
    }
