"""The grid of a sweep, mistakes that are reported before anything runs, and means and ranks of its results."""

from __future__ import annotations

import math
import statistics

import pytest

from thresher.errors import UserError
from thresher.sweep.grid import make_trials
from thresher.sweep.results import Result, State, TrialEnd, group_by_seed, mean_and_interval, ranked


def names(*overrides: str) -> list[str]:
    return [trial.name for trial in make_trials(overrides)]


def test_the_grid_is_the_product_in_the_order_of_the_settings():
    trials = make_trials(["beta=0.05,0.1", "max_steps=4", "pref_loss=sigmoid,ipo"])
    assert [trial.name for trial in trials] == [
        "beta=0.05,pref_loss=sigmoid",
        "beta=0.05,pref_loss=ipo",
        "beta=0.1,pref_loss=sigmoid",
        "beta=0.1,pref_loss=ipo",
    ]
    assert trials[1].overrides == ("beta=0.05", "max_steps=4", "pref_loss=ipo")
    assert trials[1].values == {"beta": "0.05", "pref_loss": "ipo"}


def test_commas_in_brackets_and_quotes_do_not_separate_values():
    (first, second) = make_trials(["track_with=[jsonl,console],[]", "exp_name='a,b'"])
    assert first.overrides == ("track_with=[jsonl,console]", "exp_name='a,b'")
    assert second.overrides == ("track_with=[]", "exp_name='a,b'")
    assert [trial.values for trial in (first, second)] == [{"track_with": "[jsonl,console]"}, {"track_with": "[]"}]


def test_a_device_mapping_in_python_is_one_value():
    assert names("actor_train.device_mapping=list(range(0,8))", "seed=0,1") == ["seed=0", "seed=1"]


def test_nested_settings_have_short_names_unless_two_end_alike():
    rate = "actor_train.training_args.learning_rate=1e-5,1e-4"
    assert names(rate) == ["learning_rate=1e-05", "learning_rate=0.0001"]
    workers = names("actor_train.num_workers=1,2", "reference.num_workers=1,2")
    assert workers[1] == "actor_train.num_workers=1,reference.num_workers=2"


def test_values_that_no_directory_can_be_named_after_get_different_names():
    one, other = names("pretrain=a/b,a-b")
    assert other == "pretrain=a-b"
    assert one.startswith("pretrain=a-b-")
    assert "/" not in one


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["beta=0.1"], "no setting has several values"),
        ([], "no setting has several values"),
        (["beta=0.1,0.1"], "occurs twice"),
        (["beta=0.1", "beta=0.2,0.3"], "beta is given twice"),
    ],
)
def test_a_grid_that_makes_no_sense_is_rejected(overrides, message):
    with pytest.raises(UserError, match=message):
        make_trials(overrides)


def test_the_interval_of_a_mean_is_that_of_students_t():
    # mean 2, standard deviation 1, t(2 degrees of freedom, 97.5 %) = 4.303
    mean, half_width = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-4)
    assert math.isnan(mean_and_interval([1.0])[1])


@pytest.mark.parametrize(
    ("num_seeds", "quantile"), [(16, 2.1314), (17, 2.1199), (21, 2.0860), (31, 2.0423), (121, 1.9799)]
)
def test_the_interval_over_seeds_is_that_of_students_t_distribution(num_seeds, quantile):
    """Quantiles of published tables."""
    values = [float(number) for number in range(num_seeds)]
    standard_error = statistics.stdev(values) / math.sqrt(num_seeds)
    assert mean_and_interval(values)[1] == pytest.approx(quantile * standard_error, rel=3e-4)


def results_of(*outcomes: tuple[str, State, float]) -> list[Result]:
    """Trials of a sweep over beta and seed, each with the state that it ended in and its loss."""
    trials = {trial.name: trial for trial in make_trials(["beta=0.1,0.2", "seed=1,2,3"])}
    return [Result(trials[name], TrialEnd(state), 4, {"eval/loss": loss}) for name, state, loss in outcomes]


def test_a_mean_over_seeds_has_only_the_trials_that_finished():
    groups = group_by_seed(
        results_of(
            ("beta=0.1,seed=1", "finished", 0.5),
            ("beta=0.1,seed=2", "stopped early", 9.0),
            ("beta=0.1,seed=3", "finished", 0.7),
            ("beta=0.2,seed=1", "failed", 9.0),
        )
    )
    assert [(group.values, group.num_trials) for group in groups] == [({"beta": "0.1"}, 2)]
    assert groups[0].metrics["eval/loss"][0] == pytest.approx(0.6)


@pytest.mark.parametrize(("mode", "expected"), [("min", [0.2, 0.5, math.nan]), ("max", [0.5, 0.2, math.nan])])
def test_trials_are_ranked_by_the_metric_and_those_without_it_come_last(mode, expected):
    outcomes = results_of(
        ("beta=0.1,seed=1", "failed", math.nan),
        ("beta=0.1,seed=2", "finished", 0.5),
        ("beta=0.1,seed=3", "finished", 0.2),
    )
    losses = [result.metrics["eval/loss"] for result in ranked(outcomes, "eval/loss", mode)]
    assert losses == pytest.approx(expected, nan_ok=True)
