"""A loss of the user in a Python file: what is found out about it, how it is combined, and what it may not do."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from tests.support.compared_runs import merge, metric_log
from tests.support.loss_cases import random_pairs
from tests.support.small_run_fixtures import base
from thresher.builders.checkpoints import check_resume
from thresher.builders.objective import build_objective
from thresher.config import load_config, parse_config
from thresher.errors import CheckpointError, UserError
from thresher.losses import Objective, loss_class, make_loss, make_losses

__all__ = ["base"]  # a fixture

SIGMOID = """
import torch.nn.functional as F

def dpo(pairs, beta=0.1):
    return -F.logsigmoid(pairs.shifted(beta * pairs.scores.margin))

def sft(pairs):
    return pairs.mean_chosen_nll

def quantiles(pairs, beta=0.1):
    return -F.logsigmoid(beta * pairs.log_ratios.margin.sort().values)

def squared(pairs, target=1.0):
    return (pairs.log_ratios.margin - target) ** 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SIGMOID)
    return path


def test_the_formula_of_a_loss_gives_its_values(file):
    pairs = random_pairs(dtype=torch.float64)
    own, ours = (Objective(((make_loss(name, {"beta": 0.3}), 1.0),)) for name in (f"{file}:dpo", "sigmoid"))
    assert torch.equal(own(pairs).per_pair, ours(pairs).per_pair)
    assert own(pairs).metrics["rewards/margins"] == ours(pairs).metrics["rewards/margins"]


def test_what_a_loss_reads_is_found_by_calling_it(file):
    dpo, sft, quantiles, squared = (loss_class(f"{file}:{name}") for name in ("dpo", "sft", "quantiles", "squared"))
    assert [each.needs_reference for each in (dpo, sft, quantiles, squared)] == [True, False, True, True]
    assert [each.couples_pairs for each in (dpo, sft, quantiles, squared)] == [False, False, True, False]
    assert [each.compares_sides for each in (dpo, sft, quantiles, squared)] == [True, False, True, True]
    assert dpo.supports == loss_class("sigmoid").supports
    assert sft.supports == loss_class("sft").supports | {"wpo"}
    assert squared.supports == {"clamp_log_ratio", "ld_alpha", "reference_free", "weight", "wpo"}
    with pytest.raises(UserError, match=r"gamma has no effect on .*squared"):
        Objective(((squared(), 1.0),), margin=0.5)


def test_a_loss_keeps_its_parameters_and_its_source_in_another_process(file):
    loss = make_loss(f"{file}:squared", {"target": 3.0})
    data = pickle.dumps(loss)
    file.unlink()  # a worker may have no such file
    restored = pickle.loads(data)  # noqa: S301
    assert (restored, restored.target, type(restored)) == (loss, 3.0, type(loss))


def test_a_sum_gives_each_loss_its_own_parameters(file):
    name = f"{file}:squared"
    config = parse_config(
        {
            "pref_loss": {"sigmoid": 0.8, "robust": {"weight": 0.5, "label_smoothing": 0.2}, name: {"target": 2.0}},
            "beta": 0.3,
        }
    )
    (sigmoid, robust, own), weights = zip(*build_objective(config).terms, strict=True)
    assert weights == (0.8, 0.5, 1.0)
    assert (sigmoid.beta, sigmoid.label_smoothing) == (0.3, 0.0)
    assert (robust.beta, robust.label_smoothing) == (0.3, 0.2)
    assert own.target == 2.0


@pytest.mark.parametrize(
    ("pref_loss", "message"),
    [
        ({"sigmoid": {"target": 1.0}}, "unknown parameter 'target'"),
        ({"sigmoid": {"weight": 0.0}}, "weight must be above 0"),
        (
            {"sigmoid": {"beta": 0.1}, "hinge": {"beta": 0.2}},
            "beta has no effect: pref_loss sets it for sigmoid and hinge",
        ),
    ],
)
def test_a_parameter_of_a_term_without_effect_is_an_error(pref_loss, message):
    with pytest.raises(UserError, match=message):
        build_objective(parse_config({"pref_loss": pref_loss, "beta": 0.3}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def f(pairs):\n    return pairs.scores.margin.mean()",
            r"returned \(\) for 16 pairs; return one loss per pair",
        ),
        ("def f(pairs):\n    return 1.0", "returned float for 16 pairs"),
        ("def f(pairs):\n    return pairs.scores.margin.detach()", "has no gradient"),
        ("def f(pairs):\n    return pairs.scores.margin / 0", "is not finite on random pairs"),
        ("def f(pairs):\n    return pairs.scoers", "raised AttributeError"),
        ("def f(pairs, beta):\n    return pairs.scores.margin", "the parameter beta of .* has no number as default"),
        ("def f():\n    return 1", "has no parameter for the pairs; write function"),
        ("def g(pairs):\n    return pairs", "has no function f; check the spelling"),
        ("import no_such_module", "cannot import .*mine.py: ModuleNotFoundError"),
    ],
)
def test_a_mistake_in_a_loss_is_a_user_error_before_the_run(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=message):
        loss_class(f"{tmp_path}/mine.py:f")


@pytest.mark.parametrize(
    ("name", "message"),
    [("gone.py:f", "gone.py does not exist"), ("gone.py", "names no function; write gone.py:FUNCTION")],
)
def test_a_loss_that_is_not_there_is_a_user_error(name, message):
    with pytest.raises(UserError, match=message):
        make_losses([name], {})


def test_a_run_trains_with_the_loss_of_a_file_as_with_the_same_loss_here(base, file, tmp_path):
    from thresher.pipeline import DPOPipeline

    losses = {}
    for name in ("sigmoid", f"{file}:dpo"):
        output = tmp_path / str(len(losses))
        DPOPipeline(parse_config(merge(base, {"output_dir": str(output), "max_steps": 2, "pref_loss": name}))).run()
        losses[name] = [record["loss"] for record in metric_log(output) if "loss" in record]
    assert losses["sigmoid"] == losses[f"{file}:dpo"]

    # the checkpoint knows the file's content
    values = merge(base, {"output_dir": str(tmp_path / "1"), "max_steps": 2, "pref_loss": f"{file}:dpo"})
    check_resume(parse_config(values))
    file.write_text(f"{SIGMOID}# changed\n")
    with pytest.raises(CheckpointError, match="changed since the checkpoint: pref_loss_digests"):
        check_resume(parse_config(values))
    check_resume(parse_config({**values, "resume_from_checkpoint": "auto"}))


def test_a_loss_is_named_in_a_file_and_on_the_command_line(file, tmp_path):
    path = tmp_path / "dpo.yaml"
    path.write_text(f"pref_loss: {file}:dpo\n")
    assert build_objective(load_config(path)).terms[0][0].name == f"{file}:dpo"
    config = load_config(path, [f"pref_loss={file}:squared"])
    assert build_objective(config).terms[0][0].name == f"{file}:squared"
    assert list(config.pref_loss_digests) == [f"{file}:squared"]


@pytest.mark.parametrize("named", [str, lambda name: [name, "sft"], lambda name: {name: 0.8, "sft": 0.2}])
def test_the_content_of_a_file_is_known_however_it_is_named(file, named):
    digests = []
    for _ in range(2):
        digests.append(parse_config({"pref_loss": named(f"{file}:dpo")}).pref_loss_digests[f"{file}:dpo"])
        file.write_text(f"{SIGMOID}# changed\n")
    assert digests[0] != digests[1]
