"""`freeze_module_prefix`: frozen parameters keep their bits, have no optimizer state, and are exported as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.compared_runs import merge
from tests.support.small_runs import make_base
from tests.support.tiny_llama import save_tiny_llama
from tests.support.tiny_models import tiny_model
from tests.support.tiny_run import build_run, noise_pairs
from thresher.builders.export import export_checkpoint
from thresher.builders.objective import build_objective
from thresher.builders.reference_mode import frozen_weights_digest, reference_mode
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.models.loading.trained import freeze_modules
from thresher.pipeline import DPOPipeline

FROZEN = ["model.embed_tokens", "model.layers.0"]


def frozen(prefixes: object) -> dict[str, Any]:
    return {"actor_train": {"model_args": {"freeze_module_prefix": prefixes}}}


def is_frozen(name: str) -> bool:
    return name.startswith(tuple(FROZEN))


def test_frozen_parameters_keep_their_bits_and_have_no_optimizer_state(tmp_path):
    training = {"learning_rate": 0.01, "per_device_train_batch_size": 4, "weight_decay": 0.5}
    values = {
        "pretrain": str(save_tiny_llama(tmp_path / "model", 0)),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 2,
        "pref_loss": "simpo",
        "actor_train": {"model_args": {"dtype": "fp32"}, "training_args": training},
    }
    run = build_run(merge(values, frozen(",".join(FROZEN))), noise_pairs(8))
    model = run.trainer.engine.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        run.trainer.training_step()
    after = dict(model.named_parameters())
    assert {name for name in after if torch.equal(after[name], before[name])} == set(filter(is_frozen, before))
    with_state = {id(p) for p in run.trainer.engine.parameters.optimizer.state}
    assert {name for name, p in after.items() if id(p) in with_state} == {name for name in after if not is_frozen(name)}
    assert set(run.trainer.engine.weights()) == {name for name in after if not is_frozen(name)}
    assert all(parameter.grad is None for name, parameter in after.items() if is_frozen(name))


def test_a_prefix_that_matches_nothing_is_an_error_with_the_names():
    with pytest.raises(UserError) as raised:
        freeze_modules(tiny_model("llama"), ["model.layers.0", "visual"])
    assert str(raised.value) == (
        "freeze_module_prefix ['visual'] matches no parameter of this model; its modules are model.embed_tokens, "
        "model.layers.0, model.layers.1, model.norm, lm_head"
    )


def test_freezing_every_parameter_is_an_error():
    with pytest.raises(UserError, match="freezes every parameter, so nothing is trained"):
        freeze_modules(tiny_model("llama"), ["model", "lm_head"])


def test_a_tied_parameter_is_frozen_by_either_of_its_names():
    for prefix in ("lm_head", "model.embed_tokens"):
        model = tiny_model("qwen2")
        freeze_modules(model, [prefix])
        assert not model.get_input_embeddings().weight.requires_grad


def test_a_synced_reference_cannot_follow_frozen_parameters(tmp_path):
    config = parse_config({"reference": {"sync_steps": 2}, **frozen("lm_head")})
    with pytest.raises(UserError, match="sync_steps does not work with freeze_module_prefix"):
        reference_mode(config, build_objective(config))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """A run of one step with frozen modules whose checkpoint lacks them."""
    directory = tmp_path_factory.mktemp("run")
    base = make_base(directory) | {"output_dir": str(directory / "run"), "cache_dir": str(directory / "cache")}
    values = merge(base | {"validation": None, "eval_steps": 0, "max_steps": 1}, frozen(FROZEN))
    DPOPipeline(parse_config(values)).run()
    return values, directory


def test_an_exported_model_has_the_frozen_weights_of_the_initial_one(run_dir):
    values, directory = run_dir
    export_checkpoint(directory / "run" / "checkpoints" / "step-00000001", directory / "exported")
    before, after = (
        load_file(Path(path) / "model.safetensors") for path in (values["pretrain"], directory / "exported")
    )
    assert before.keys() == after.keys()
    assert {name for name in after if torch.equal(after[name], before[name])} == set(filter(is_frozen, before))


def test_the_frozen_weights_identify_a_run_without_a_reference(run_dir):
    values, _ = run_dir
    some, none = (parse_config(merge(values, frozen(prefixes))) for prefixes in (FROZEN, []))
    assert frozen_weights_digest(some, "none") is not None
    assert frozen_weights_digest(none, "none") is None
