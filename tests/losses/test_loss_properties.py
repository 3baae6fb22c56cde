"""Properties that hold for any pairs: independence, order, micro-batches, and finite numbers at extreme logps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.loss_cases import (
    ALL_LOSSES,
    COUPLED_LOSSES,
    INDEPENDENT_LOSSES,
    evaluate,
    objective_of,
    side,
    take_pairs,
)
from thresher.losses import ExampleLogps, ObjectiveInputs, concat_pairs

LOGPS = st.floats(-20.0, 0.0, width=32)
EXTREME_LOGPS = st.one_of(st.sampled_from([0.0, -1e-8, -1e4]), LOGPS)
EXAMPLES = settings(max_examples=15, deadline=None)


@st.composite
def pair_logps(draw: st.DrawFn, logps: st.SearchStrategy[float] = LOGPS, dtype: torch.dtype = torch.float64):
    num_pairs = draw(st.integers(1, 5))

    def rows(lengths: list[int]) -> list[list[float]]:
        return [draw(st.lists(logps, min_size=n, max_size=n)) for n in lengths]

    def lengths(least: int) -> list[int]:
        return draw(st.lists(st.integers(least, 4), min_size=num_pairs, max_size=num_pairs))

    chosen, rejected = lengths(0), lengths(0)
    return ObjectiveInputs(
        ExampleLogps.of(side(rows(chosen), dtype), side(rows(rejected), dtype)),
        ExampleLogps.of(side(rows(chosen), dtype), side(rows(rejected), dtype)),
    )


@pytest.mark.parametrize("name", INDEPENDENT_LOSSES)
@EXAMPLES
@given(parts=st.lists(pair_logps(), min_size=2, max_size=3))
def test_micro_batches_do_not_change_a_pairs_loss_or_gradient(name, parts):
    objective = objective_of(name)
    whole = evaluate(objective, concat_pairs(parts)).as_list()
    split = [evaluate(objective, part).as_list() for part in parts]
    for index, value in enumerate(whole):
        torch.testing.assert_close(value, torch.cat([part[index] for part in split]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", INDEPENDENT_LOSSES)
@EXAMPLES
@given(pairs=pair_logps(), data=st.data())
def test_pair_order_carries_over_to_the_losses(name, pairs, data):
    order = data.draw(st.permutations(range(pairs.num_pairs)))
    straight = evaluate(objective_of(name), pairs).values
    shuffled = evaluate(objective_of(name), take_pairs(pairs, order)).values
    torch.testing.assert_close(shuffled, straight[list(order)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", COUPLED_LOSSES)
@EXAMPLES
@given(pairs=pair_logps(), data=st.data())
def test_pair_order_does_not_change_the_quantiles_of_a_coupled_loss(name, pairs, data):
    order = data.draw(st.permutations(range(pairs.num_pairs)))
    straight = evaluate(objective_of(name), pairs).values
    torch.testing.assert_close(evaluate(objective_of(name), take_pairs(pairs, order)).values, straight)


@pytest.mark.parametrize("name", INDEPENDENT_LOSSES)
@EXAMPLES
@given(pairs=pair_logps(), other=pair_logps(EXTREME_LOGPS))
def test_a_pair_does_not_depend_on_its_neighbors(name, pairs, other):
    objective = objective_of(name)
    alone = evaluate(objective, pairs)
    crowded = evaluate(objective, concat_pairs([other, pairs]))
    tokens = pairs.policy.chosen.values.numel()
    torch.testing.assert_close(crowded.values[other.num_pairs :], alone.values, rtol=1e-12, atol=1e-12)
    grad = crowded.chosen_grad[crowded.chosen_grad.numel() - tokens :]
    torch.testing.assert_close(grad, alone.chosen_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL_LOSSES)
@EXAMPLES
@given(data=st.data())
def test_values_and_gradients_are_finite_at_extreme_logps(name, dtype, data):
    pairs = data.draw(pair_logps(EXTREME_LOGPS, dtype))
    # a margin of -8e4 nats is exp(8000) to the exponential part of discopop: its gate must have closed by then
    result = evaluate(objective_of(name), pairs)
    assert all(bool(torch.isfinite(t).all()) for t in result.as_list())


# The regressions have a target to come back to, exo's is the smoothed label, and discopop is not monotone near 0.
MONOTONE = [n for n in ALL_LOSSES if n not in ("ipo", "ipo_sum", "sppo_hard", "exo_pair", "discopop", "robust", "sft")]


@pytest.mark.parametrize("name", MONOTONE)
@EXAMPLES
@given(pairs=pair_logps())
def test_a_less_likely_rejected_side_never_raises_the_loss(name, pairs):
    assert bool((evaluate(objective_of(name), pairs).rejected_grad >= 0).all())


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_an_empty_batch_has_every_metric_with_a_count_of_zero(name):
    """A rank may have no pairs in a step; its metrics must have the same names as those of the other ranks."""
    empty = ExampleLogps.of(side([], torch.float32), side([], torch.float32))
    some = ExampleLogps.of(side([[-1.0], [-2.0]], torch.float32), side([[-3.0], [-0.5]], torch.float32))
    nothing, something = (objective_of(name)(ObjectiveInputs(sides, sides)).metrics for sides in (empty, some))
    assert nothing.keys() == something.keys()
    assert all((float(metric.sum), float(metric.count)) == (0.0, 0.0) for metric in nothing.values())
