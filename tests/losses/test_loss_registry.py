"""Losses by name: lookup, error messages and table rows."""

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

import thresher.losses
from tests.support.loss_cases import ALL_LOSSES, REFERENCE_LOSSES, RESPONSE_LOSSES, REWARD_LOSSES, SCORED_LOSSES
from thresher.errors import UserError
from thresher.losses import describe, loss_class, loss_names, make_loss, make_losses, parameter_defaults
from thresher.losses.formulas import Sigmoid
from thresher.losses.registry import register


def test_every_loss_is_registered():
    assert loss_names() == sorted(ALL_LOSSES + RESPONSE_LOSSES + REWARD_LOSSES + SCORED_LOSSES)
    assert loss_class("sigmoid") is Sigmoid


def test_public_names_exist():
    assert all(hasattr(thresher.losses, name) for name in thresher.losses.__all__)


def test_unknown_loss_names_the_nearest_and_all():
    with pytest.raises(
        UserError, match=r"unknown loss 'sigmod', did you mean 'sigmoid'\?; the losses are alphapo, aot, .*sppo"
    ):
        make_loss("sigmod", {})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("kto_pair", "use kto on labelled responses, or bco_pair on pairs"),
        ("grpo", "it needs responses that are sampled during training; use sigmoid (DPO) on stored pairs"),
        ("online_dpo", "it needs responses that are sampled during training; use sigmoid (DPO) on stored pairs"),
        ("dpo", "use sigmoid"),
        ("cdpo", "use sigmoid with label_smoothing"),
        ("R-DPO", "use sigmoid with length_penalty"),
        ("humanline", "use sigmoid with clamp_log_ratio: [-1, 1.5] and reference.sync_steps"),
    ],
)
def test_a_method_that_is_not_a_loss_on_pairs_says_what_to_use(name, advice):
    with pytest.raises(UserError) as caught:
        loss_class(name)
    assert str(caught.value) == f"pref_loss {name} is not a loss of thresher: {advice} (see `thresher losses`)"


@pytest.mark.parametrize("name", ["zpo", "drpo", "vdpo", "loss", "", "ddpo", "xxx"])
def test_a_name_unlike_any_loss_suggests_none(name):
    with pytest.raises(UserError, match=f"unknown loss '{name}'; the losses are alphapo, aot, "):
        loss_class(name)


@pytest.mark.parametrize(
    ("name", "meant"), [("simop", "simpo"), ("SimPO", "simpo"), ("apo-zero", "apo_zero"), ("orp", "orpo")]
)
def test_a_misspelled_loss_suggests_the_right_one(name, meant):
    with pytest.raises(UserError, match=f"unknown loss '{name}', did you mean '{meant}'"):
        loss_class(name)


def test_parameter_of_other_losses_names_the_losses_that_use_it():
    with pytest.raises(
        UserError,
        match=r"sigmoid has no parameter gamma, only beta, label_smoothing; gamma is a parameter of alphapo, simpo$",
    ):
        make_loss("sigmoid", {"gamma": 1.0})


def test_loss_without_parameters_says_so():
    with pytest.raises(UserError, match=r"sft has no parameters; cpo_alpha is a parameter of cpo$"):
        make_loss("sft", {"cpo_alpha": 1.0})


def test_unknown_parameter_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown parameter 'bta', did you mean 'beta'\?; sigmoid has beta"):
        make_loss("sigmoid", {"bta": 1.0})


def test_state_is_not_a_parameter():
    assert parameter_defaults("bco_pair") == {"beta": 0.1}
    with pytest.raises(UserError, match="unknown parameter 'delta'"):
        make_loss("bco_pair", {"delta": 1.0})


def test_the_parameter_of_one_loss_takes_precedence_over_that_of_all():
    sigmoid, bco = make_losses(["sigmoid", "bco_pair"], {"beta": 0.1}, {"sigmoid": {"beta": 0.5}})
    assert (sigmoid.beta, bco.beta) == (0.5, 0.1)


def test_several_losses_share_the_parameters_they_have():
    sigmoid, bco, sft = make_losses(["sigmoid", "bco_pair", "sft"], {"beta": 0.3, "label_smoothing": 0.1})
    assert sigmoid == make_loss("sigmoid", {"beta": 0.3, "label_smoothing": 0.1})
    assert bco == make_loss("bco_pair", {"beta": 0.3})
    assert sft == make_loss("sft", {})
    with pytest.raises(UserError, match=r"sigmoid \+ sft has no parameter gamma"):
        make_losses(["sigmoid", "sft"], {"gamma": 1.0})


def test_defaults_are_those_of_the_papers():
    assert parameter_defaults("simpo") == {"beta": 2.0, "gamma": 1.0}
    assert parameter_defaults("alphapo") == {"beta": 2.5, "gamma": 0.1, "alphapo_alpha": 0.25}
    assert parameter_defaults("dpop") == {"beta": 0.3, "dpop_lambda": 50.0}
    assert parameter_defaults("sigmoid") == {"beta": 0.1, "label_smoothing": 0.0}
    assert parameter_defaults("exo_pair")["label_smoothing"] == 1e-3
    assert parameter_defaults("discopop")["discopop_tau"] == 0.05
    assert parameter_defaults("cpo")["cpo_alpha"] == 1.0


def test_a_name_cannot_be_taken_twice():
    with pytest.raises(ValueError, match="two losses are named sigmoid"):
        register("sigmoid", paper="2305.18290", supports=())


def test_a_registered_loss_is_a_frozen_dataclass():
    for name in loss_names():
        loss = loss_class(name)()
        with pytest.raises(FrozenInstanceError):
            loss.beta = 1.0


def test_rows_describe_every_loss():
    rows = {row.name: row for row in describe()}
    assert list(rows) == loss_names()
    assert {name for name, row in rows.items() if row.needs_reference} == {
        *REFERENCE_LOSSES,
        *RESPONSE_LOSSES,
        *SCORED_LOSSES,
    }
    for row in rows.values():
        assert row.summary.endswith(".")
        assert row.paper in (loss_class(row.name).__doc__ or "")


def test_losses_import_nothing_above_them():
    code = (
        "import sys, thresher.losses; "
        "above = [m for m in sys.modules if m.startswith('thresher.') and not m.startswith('thresher.losses')]; "
        "assert set(above) == {'thresher.errors', 'thresher.imported_function', 'thresher.redact'}, above; "
        "assert not {'transformers', 'ray', 'pydantic'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
