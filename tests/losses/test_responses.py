"""Losses on single labelled responses and on lists, against formulas written out in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.support.loss_cases import side
from thresher.errors import UserError
from thresher.losses import ExampleLogps, Objective, ObjectiveInputs, make_loss, merge_metrics
from thresher.losses.responses import BCO

LABELS = [1.0, 0.0, 1.0, 0.0, 0.0]
LABEL_LOSSES = ["kto", "bco", "apo_zero_unpaired"]


def objective_of(name: str, parameters: dict[str, float] | None = None, **settings: object) -> Objective:
    return Objective(((make_loss(name, parameters or {}), 1.0),), **settings)


def random_examples(
    lengths: Sequence[Sequence[int]], values: Sequence[Sequence[float]] | None, seed: int = 0
) -> ObjectiveInputs:
    """Examples whose responses have these numbers of tokens, 0 for an absent one; fp64."""
    generator = torch.Generator().manual_seed(seed)

    def of_side(number: int) -> list[list[float]]:
        return [
            (-3.0 * torch.rand(each[number], generator=generator, dtype=torch.float64)).tolist() for each in lengths
        ]

    def logps(*, grad: bool) -> ExampleLogps:
        return ExampleLogps(tuple(side(of_side(number), grad=grad) for number in range(len(lengths[0]))))

    return ObjectiveInputs(logps(grad=True), logps(grad=False), values=None if values is None else torch.tensor(values))


def labelled(seed: int = 0, *, mismatched: bool = True) -> ObjectiveInputs:
    lengths = [[3, 4], [2, 1], [5, 3], [1, 2], [4, 4]]
    lengths = lengths if mismatched else [each[:1] for each in lengths]
    return random_examples(lengths, [[label] * len(lengths[0]) for label in LABELS], seed)


def log_ratios(inputs: ObjectiveInputs, number: int) -> list[float]:
    return (inputs.policy.side(number).sums() - inputs.reference.side(number).sums()).tolist()


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("seed", [0, 1])
def test_kto_is_the_formula_of_the_paper(seed):
    inputs = labelled(seed)
    shifted = inputs.reference.side(1).values + (0.5 if seed else -0.5)  # seed 0: the mean is clamped
    inputs = replace(
        inputs, policy=ExampleLogps.of(inputs.policy.chosen, replace(inputs.policy.side(1), values=shifted))
    )
    parameters = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    output = objective_of("kto", parameters)(inputs)
    z0 = max(0.0, sum(log_ratios(inputs, 1)) / 5)
    assert (z0 > 0) == bool(seed)
    expected = [
        1.5 * (1 - sig(0.3 * (r - z0))) if label else 0.7 * (1 - sig(0.3 * (z0 - r)))
        for r, label in zip(log_ratios(inputs, 0), LABELS, strict=True)
    ]
    assert output.per_pair.tolist() == pytest.approx(expected, abs=1e-12)
    assert float(output.metrics["kto/z0"].mean) == pytest.approx(z0, abs=1e-12)
    output.per_pair.sum().backward()
    slopes = [
        weight * sign * 0.3 * sig(0.3 * (r - z0)) * sig(0.3 * (z0 - r))
        for r, weight, sign in zip(
            log_ratios(inputs, 0), [1.5 if each else 0.7 for each in LABELS], [-1 if each else 1 for each in LABELS],
            strict=True,
        )
    ]  # fmt: skip
    chosen = inputs.policy.chosen
    assert chosen.values.grad.tolist() == pytest.approx(
        torch.tensor(slopes, dtype=torch.float64).repeat_interleave(chosen.lengths).tolist(), abs=1e-12
    )


def test_mismatched_responses_have_no_gradient():
    inputs = labelled()
    objective_of("kto")(inputs).per_pair.sum().backward()
    mismatched = inputs.policy.side(1).values.grad
    assert mismatched is None or not mismatched.any()


def test_the_entropy_of_kto_is_a_mean_over_the_answers_alone():
    inputs = labelled()
    answers, mismatched = inputs.policy.sides
    sides = (
        replace(answers, entropy=torch.full_like(answers.values, 2.0)),
        replace(mismatched, entropy=torch.full_like(mismatched.values, 5.0)),
    )
    entropy = objective_of("kto")(replace(inputs, policy=ExampleLogps(sides))).metrics["entropy"]
    assert (float(entropy.mean), int(entropy.count)) == (2.0, 15)


def test_a_kto_step_without_mismatched_responses_has_the_reference_point_0():
    assert float(objective_of("kto")(labelled(mismatched=False)).metrics["kto/z0"].mean) == 0.0


def test_bco_and_apo_are_their_formulas():
    inputs = labelled(mismatched=False)
    rewards = [0.2 * r for r in log_ratios(inputs, 0)]
    bco = Objective(((BCO(beta=0.2, delta=0.4, num_examples_seen=7), 1.0),))
    expected = [-math.log(sig(r - 0.4 if label else 0.4 - r)) for r, label in zip(rewards, LABELS, strict=True)]
    assert bco(inputs).per_pair.tolist() == pytest.approx(expected, abs=1e-12)
    expected = [1 - sig(r) if label else sig(r) for r, label in zip(rewards, LABELS, strict=True)]
    apo = objective_of("apo_zero_unpaired", {"beta": 0.2})
    assert apo(inputs).per_pair.tolist() == pytest.approx(expected, abs=1e-12)


def test_bco_keeps_the_mean_reward_of_all_responses():
    inputs = labelled(mismatched=False)
    objective = objective_of("bco", {"beta": 0.2})
    after = objective.after_step(objective(inputs).metrics)
    mean = 0.2 * sum(log_ratios(inputs, 0)) / 5
    assert after.state() == {"bco": {"delta": pytest.approx(mean), "num_examples_seen": 5.0}}


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_equal_models_give_the_loss_at_margin_0(name):
    inputs = labelled()
    objective = objective_of(name)
    equal = replace(inputs, reference=inputs.policy.detach())
    assert objective(equal).per_pair.tolist() == pytest.approx([objective.zero_margin_loss] * 5, abs=1e-12)


@pytest.mark.parametrize("name", [*LABEL_LOSSES, "sft"])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_step_with_one_label_only_is_finite(name, label):
    inputs = replace(labelled(), values=torch.full((5, 2), label))
    output = objective_of(name, reads_labels=True)(inputs)
    assert output.per_pair.isfinite().all()
    counts = {name: float(output.metrics[f"rewards/{name}"].count) for name in ("chosen", "rejected")}
    assert counts == {"chosen": 5 * label, "rejected": 5 * (1 - label)}


def test_sft_trains_on_desirable_responses_alone():
    inputs = labelled(mismatched=False)
    output = objective_of("sft", reads_labels=True)(inputs)
    means = (-inputs.policy.chosen.sums() / inputs.policy.chosen.lengths).tolist()
    assert output.per_pair.tolist() == pytest.approx([m * label for m, label in zip(means, LABELS, strict=True)])


@pytest.mark.parametrize("name", ["bco", "apo_zero_unpaired"])
def test_label_metrics_do_not_depend_on_micro_batches(name):
    objective = objective_of(name)
    lengths, values = [[3], [2], [5], [1], [4]], [[label] for label in LABELS]
    whole = random_examples(lengths, values)

    def part(start: int, stop: int) -> ObjectiveInputs:
        def rows(logps: ExampleLogps) -> ExampleLogps:
            first, values = logps.chosen, logps.chosen.values.split(logps.chosen.lengths.tolist())
            return ExampleLogps.of(
                replace(first, values=torch.cat(values[start:stop]), lengths=first.lengths[start:stop])
            )

        return ObjectiveInputs(rows(whole.policy), rows(whole.reference), values=whole.values[start:stop])

    merged = merge_metrics([objective(part(0, 2)).metrics, objective(part(2, 5)).metrics])
    for key, metric in objective(whole).metrics.items():
        assert merged[key].mean == pytest.approx(metric.mean, rel=1e-12), key


def test_a_label_loss_and_a_pairwise_loss_cannot_be_added_up():
    with pytest.raises(UserError, match=r"sigmoid compares the responses to a prompt.*join_labelled=true"):
        Objective(((make_loss("kto", {}), 1.0), (make_loss("sigmoid", {}), 1.0)))


# ragged: four, two and three responses
RANKED = [[3, 4, 2, 5], [2, 1, 0, 0], [5, 3, 1, 0]]
SCORES = [[4.0, 3.0, 3.0, 1.0], [2.0, 1.0, 0.0, 0.0], [9.0, 8.5, 2.0, 0.0]]
# of each example: the responses that are ranked below each one, and itself
BELOW = [{0: [0, 1, 2, 3], 1: [1, 3], 2: [2, 3], 3: [3]}, {0: [0, 1], 1: [1]}, {0: [0, 1, 2], 1: [1, 2], 2: [2]}]


def test_plackett_luce_is_the_formula_of_the_paper():
    inputs = random_examples(RANKED, SCORES)
    ratios = list(zip(*(log_ratios(inputs, number) for number in range(4)), strict=True))
    expected = [
        -sum(0.2 * r[k] - math.log(sum(math.exp(0.2 * r[j]) for j in below)) for k, below in of.items())
        for r, of in zip(ratios, BELOW, strict=True)
    ]
    assert objective_of("plackett_luce", {"beta": 0.2})(inputs).per_pair.tolist() == pytest.approx(expected, abs=1e-12)


def test_infonca_is_the_formula_of_the_paper():
    inputs = random_examples(RANKED, SCORES)
    ratios = list(zip(*(log_ratios(inputs, number) for number in range(4)), strict=True))
    expected = []
    for r, scores, of in zip(ratios, SCORES, BELOW, strict=True):
        shares = [math.exp(scores[k] / 2.0) for k in of]
        total = sum(math.exp(0.2 * r[k]) for k in of)
        expected.append(
            -sum(s / sum(shares) * math.log(math.exp(0.2 * r[k]) / total) for s, k in zip(shares, of, strict=True))
        )
    objective = objective_of("infonca", {"beta": 0.2, "infonca_alpha": 2.0})
    assert objective(inputs).per_pair.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["plackett_luce", "infonca"])
def test_absent_responses_have_a_finite_gradient(name):
    inputs = random_examples(RANKED, SCORES)
    objective_of(name)(inputs).per_pair.sum().backward()
    assert all(bool(each.values.grad.isfinite().all()) for each in inputs.policy.sides)


def test_plackett_luce_of_two_responses_is_sigmoid():
    pairs = random_examples([[3, 4], [2, 6], [5, 1]], None)
    lists = replace(pairs, values=torch.tensor([[1.0, 0.0]] * 3))
    expected = objective_of("sigmoid", {"beta": 0.3})(pairs).per_pair
    for inputs in (pairs, lists):
        found = objective_of("plackett_luce", {"beta": 0.3})(inputs).per_pair
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def gradients(inputs: ObjectiveInputs) -> list[float]:
    return [value for each in inputs.policy.sides for value in each.values.grad.tolist()]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo", "orpo", "apo_zero"])
def test_all_comparisons_have_the_gradient_of_the_separate_pairs(loss):
    four = random_examples([[3, 4, 2, 5]], [[4.0, 3.0, 2.0, 1.0]])
    objective = objective_of(loss)
    (objective(four).per_pair.sum()).backward()
    found = gradients(four)
    for each in four.policy.sides:
        each.values.grad = None
    values = []
    for better in range(4):
        for worse in range(better + 1, 4):
            policy, reference = (
                ExampleLogps.of(each.side(better), each.side(worse)) for each in (four.policy, four.reference)
            )
            values.append(objective(ObjectiveInputs(policy, reference)).per_pair / 6)
    torch.cat(values).sum().backward()
    assert found == pytest.approx(gradients(four), abs=1e-6)


def test_the_running_mean_of_bco_pair_counts_the_comparisons_of_lists():
    inputs = random_examples(RANKED, SCORES)
    metrics = objective_of("bco_pair", comparisons="best_worst")(inputs).metrics
    chosen, rejected = metrics["bco_pair/chosen_reward"], metrics["bco_pair/rejected_reward"]
    worst = [log_ratios(inputs, last)[at] for at, last in enumerate((3, 1, 2))]
    assert (int(chosen.count), float(chosen.sum)) == (3, pytest.approx(0.1 * sum(log_ratios(inputs, 0))))
    assert float(rejected.sum) == pytest.approx(0.1 * sum(worst))


@pytest.mark.parametrize(
    ("comparisons", "expected"),
    [
        # the second and the third response of the first example are equally good
        ("all", [[(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)], [(0, 1)], [(0, 1), (0, 2), (1, 2)]]),
        ("adjacent", [[(0, 1), (2, 3)], [(0, 1)], [(0, 1), (1, 2)]]),
        ("best_worst", [[(0, 3)], [(0, 1)], [(0, 2)]]),
        ("best_rest", [[(0, 1), (0, 2), (0, 3)], [(0, 1)], [(0, 1), (0, 2)]]),
    ],
)
def test_the_loss_of_a_list_is_the_mean_over_its_comparisons_each_with_the_margin_of_the_list(comparisons, expected):
    margins = [0.3, -0.2, 0.7]
    inputs = replace(random_examples(RANKED, SCORES), margin=torch.tensor(margins, dtype=torch.float64))
    ratios = list(zip(*(log_ratios(inputs, number) for number in range(4)), strict=True))
    means = [
        sum(math.log(1 + math.exp(margin - 0.1 * (r[better] - r[worse]))) for better, worse in pairs) / len(pairs)
        for r, margin, pairs in zip(ratios, margins, expected, strict=True)
    ]
    output = objective_of("sigmoid", comparisons=comparisons)(inputs)
    assert output.per_pair.tolist() == pytest.approx(means, abs=1e-12)
    assert float(output.metrics["rewards/margins"].count) == sum(map(len, expected))
    assert float(output.metrics["loss"].mean) == pytest.approx(sum(means) / 3, abs=1e-12)


# the three best responses of the second example are equally good
TIED = [[4.0, 3.0, 3.0, 1.0], [2.0, 2.0, 0.0, 0.0], [9.0, 8.5, 2.0, 0.0]]
TIED_LENGTHS = [[3, 4, 2, 5], [2, 1, 3, 0], [5, 3, 1, 0]]


@pytest.mark.parametrize("comparisons", ["all", "adjacent", "best_worst", "best_rest"])
@pytest.mark.parametrize(
    ("losses", "settings"),
    [
        ({"sft": 0.5}, {}),
        ({"sigmoid": 1.0, "sft": 0.5}, {}),
        ({"sigmoid": 1.0}, {"rpo_alpha": 0.5}),
        ({"plackett_luce": 1.0, "sft": 0.5}, {}),
    ],
    ids=["sft", "sigmoid + sft", "sigmoid + rpo_alpha", "plackett_luce + sft"],
)
def test_the_likelihood_term_of_a_list_is_that_of_its_best_response(losses, settings, comparisons):
    inputs = random_examples(TIED_LENGTHS, TIED)
    terms = tuple((make_loss(name, {}), weight) for name, weight in losses.items())
    found = Objective(terms, comparisons=comparisons, **settings)(inputs).per_pair
    without = tuple(each for each in terms if each[0].name != "sft")
    rest = Objective(without, comparisons=comparisons)(inputs).per_pair if without else torch.zeros_like(found)
    means = [[-m for m in (each.sums() / each.lengths.clamp(min=1)).tolist()] for each in inputs.policy.sides]
    best = [means[0][0], (means[0][1] + means[1][1]) / 2, means[0][2]]
    assert (found - rest).tolist() == pytest.approx([0.5 * each for each in best], abs=1e-12)


def test_the_likelihood_term_of_a_list_has_a_gradient_in_the_best_responses_alone():
    inputs = random_examples(TIED_LENGTHS, TIED)
    objective_of("sft")(inputs).per_pair.sum().backward()
    first, second, *others = (each.values.grad.tolist() for each in inputs.policy.sides)
    assert first == pytest.approx([-1 / 3] * 3 + [-1 / 4] * 2 + [-1 / 5] * 5)
    assert second == pytest.approx([0.0] * 4 + [-1 / 2] + [0.0] * 3)
    assert not any(map(any, others))


def test_token_weights_of_pairs_reach_losses_on_lists():
    """Of two responses, plackett_luce is sigmoid."""
    inputs = random_examples([[3, 4], [2, 1], [5, 3]], None)
    draw = torch.Generator().manual_seed(1)
    sides = [replace(each, token_weights=torch.rand(each.values.shape, generator=draw)) for each in inputs.policy.sides]
    weighted = replace(inputs, policy=ExampleLogps(tuple(sides)))
    found, expected = (objective_of(name, {"beta": 0.3})(weighted).per_pair for name in ("plackett_luce", "sigmoid"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(found, objective_of("plackett_luce", {"beta": 0.3})(inputs).per_pair)
