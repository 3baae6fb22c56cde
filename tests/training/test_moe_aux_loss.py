"""`moe_aux_loss_coef`: the load-balancing loss of transformers, over the tokens of a step, is added to its loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeConfig, OlmoeConfig, PhimoeConfig, Qwen2MoeConfig

from tests.support.compared_runs import merge
from tests.support.small_runs import save_small_tokenizer
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import FAMILIES, GROUPED, MIXED, tiny_model
from tests.support.tiny_run import build_run, noise_pairs
from thresher.builders.engines import check_engine
from thresher.builders.inputs import find_layout
from thresher.config import parse_config
from thresher.config.roles import ModelArgs, TrainingArgs
from thresher.data.example import ExampleBatch
from thresher.engines.accumulate import MicroBatch
from thresher.engines.native.build import train_engine
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.losses.registry import make_losses
from thresher.models.layouts import PackedLayout, PaddedLayout, with_ends
from thresher.models.loading.load import without_dropout
from thresher.models.router import FAMILIES as ROUTERS

COEF = 0.3
_NO_OTHER_LOSS = 1e-12
LAYOUTS = {
    "padded": PaddedLayout(pad_id=0),
    "packed": PackedLayout(shares_prompt=False),
    "shared": PackedLayout(shares_prompt=True),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    **{family: STATEFUL[family] for family in ("qwen3_next", "qwen3_5_moe_text")},
    "mixtral": FAMILIES["mixtral"],
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "qwen2_moe": Qwen2MoeConfig(**GROUPED, **EXPERTS, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "olmoe": OlmoeConfig(**GROUPED, **EXPERTS),
    "granitemoe": GraniteMoeConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "phimoe": PhimoeConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
}


def model_of(family: str) -> Any:
    if family in FAMILIES:
        model = tiny_model(family)
    else:
        torch.manual_seed(0)
        config = copy.deepcopy(CONFIGS[family])
        config.initializer_range = 0.3
        model = AutoModelForCausalLM.from_config(config)
    return without_dropout(model)


def theirs(model: Any, batch: ExampleBatch) -> torch.Tensor:
    """The loss of transformers on the padded sequences."""
    sequences = [
        torch.from_numpy(np.concatenate([pair.prompt_ids, side])).long()
        for pair in batch.pairs
        for side in (pair.chosen.ids, pair.rejected.ids)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in sequences], batch_first=True)
    loss: torch.Tensor = model.eval()(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    return loss


def gradients(
    model: Any,
    batches: list[ExampleBatch],
    *,
    coef: float,
    layout: str = "padded",
    loss: str = "sft",
    dtype: torch.dtype = torch.float32,
    weight: float = 1.0,
) -> tuple[dict[str, torch.Tensor], float | None]:
    """Gradients of a step from these micro-batches, and the logged loss of the router."""
    model = copy.deepcopy(model)
    rows = with_ends(LAYOUTS[layout]) if coef else LAYOUTS[layout]
    policy = train_engine(
        model, rows, dtype, TrainingArgs(learning_rate=1.0), model_args=ModelArgs(moe_aux_loss_coef=coef)
    )
    objective = Objective(terms=((make_losses([loss], {})[0], weight),))
    micro_batches = [MicroBatch(batch, policy.score(batch) if objective.needs_reference else None) for batch in batches]
    metrics, _, _ = policy.accumulate(micro_batches, objective, sum(map(len, batches)))
    logged = metrics.get("moe_aux_loss")
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, logged and logged.mean


def added_by_the_router(model: Any, batches: list[ExampleBatch], **settings: Any) -> dict[str, torch.Tensor]:
    """What the router's loss adds to the gradients of a step."""
    without, nothing = gradients(model, batches, coef=0.0, **settings)
    with_it, _ = gradients(model, batches, coef=COEF, **settings)
    assert nothing is None
    return {name: with_it[name] - without[name] for name in without}


def split(batch: ExampleBatch) -> list[ExampleBatch]:
    return [ExampleBatch(batch.pair_ids[[i]], (pair,)) for i, pair in enumerate(batch.pairs)]


@pytest.mark.parametrize("family", ROUTERS)
def test_the_loss_of_a_padded_batch_is_that_of_transformers(family):
    model = model_of(family)
    assert model.config.model_type == family
    _, logged = gradients(model, [MIXED], coef=COEF)
    assert logged == pytest.approx(theirs(model, MIXED).item(), abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_5_moe_text"])
def test_the_gradient_is_that_of_transformers_for_any_layout_and_micro_batches(family, layout):
    """A shared prompt counts for both of its sequences, and padding does not count."""
    model = model_of(family)
    reference = copy.deepcopy(model)
    (COEF * theirs(reference, MIXED)).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    routers = [name for name in expected if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == model.config.num_hidden_layers
    assert all(expected[name].abs().max() > 1e-4 for name in routers)
    for batches in ([MIXED], split(MIXED)):
        found, logged = gradients(model, batches, coef=COEF, layout=layout, weight=_NO_OTHER_LOSS)
        assert logged == pytest.approx(theirs(model, MIXED).item(), abs=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


def test_a_loss_that_couples_pairs_gets_the_same_term():
    model = model_of("qwen3_moe")
    one, other = (added_by_the_router(model, split(MIXED), loss=loss) for loss in ("sft", "aot"))
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, atol=2e-6, rtol=1e-4)


def test_in_fp16_the_term_has_the_scale_of_the_loss():
    model = model_of("qwen3_moe")
    expected = added_by_the_router(model, split(MIXED))
    found = added_by_the_router(model, split(MIXED), dtype=torch.float16)
    for name in (name for name in expected if name.endswith("gate.weight")):
        torch.testing.assert_close(found[name] / 2.0**16, expected[name], atol=2e-4, rtol=0.02)


def test_recomputed_activations_give_the_same_gradient():
    model = model_of("qwen3_moe")
    expected, _ = gradients(model, split(MIXED), coef=COEF)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, _ = gradients(model, split(MIXED), coef=COEF)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


def test_an_empty_micro_batch_adds_nothing():
    """Ranks in lockstep score dummy batches."""
    model = model_of("qwen3_moe")
    expected, value = gradients(model, [MIXED], coef=COEF)
    found, logged = gradients(model, [MIXED, ExampleBatch(np.zeros(0, dtype=np.int64), ())], coef=COEF)
    assert logged == value
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=0, rtol=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("moe")
    model_of("qwen3_moe").save_pretrained(directory / "moe")
    tiny_model("llama").save_pretrained(directory / "llama")
    training = {"learning_rate": 0.01, "per_device_train_batch_size": 4, "adam_epsilon": 1e-3}
    return {
        "pretrain": str(directory / "moe"),
        "output_dir": str(directory / "out"),
        "max_steps": 2,
        "pref_loss": "simpo",
        "actor_train": {"model_args": {"dtype": "fp32"}, "training_args": training},
    }


def test_the_rows_of_a_run_are_all_tokens(base):
    """Of the reference too, so that both round alike."""
    save_small_tokenizer(Path(base["pretrain"]))
    layouts = [
        find_layout(parse_config(merge(base, {"actor_train": {"model_args": {"moe_aux_loss_coef": coef}}})))[1]
        for coef in (0.0, 0.3)
    ]
    assert layouts[1] == with_ends(layouts[0]) != layouts[0]


def test_a_run_logs_the_loss_and_trains_the_router_with_it(base):
    runs = {}
    for coef in (None, 0.0, 0.3):
        run = build_run(merge(base, {"actor_train": {"model_args": {"moe_aux_loss_coef": coef}}}), noise_pairs(8))
        metrics = run.trainer.training_step()
        runs[coef] = metrics, run.trainer.engine.weights()["model.layers.0.mlp.gate.weight"].clone()
    assert "moe_aux_loss" not in runs[None][0]
    assert torch.equal(runs[None][1], runs[0.0][1])
    assert runs[0.3][0]["moe_aux_loss"].mean > 1.0  # 2 experts per token; balanced routing gives 2
    assert runs[0.3][0]["loss"].mean == runs[None][0]["loss"].mean
    assert (runs[0.3][1] - runs[None][1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"training_args": {"torch_compile": True}},
        {"num_workers": 2, "strategy_args": {"strategy_config": {"pp_size": 2, "pp_schedule": "zero_bubble"}}},
    ],
    ids=["torch_compile", "pp_schedule"],
)
def test_what_cannot_be_exact_is_an_error_before_the_run(base, changes, request):
    reason = f"is not supported with {request.node.callspec.id}"
    values = merge(base, {"actor_train": {**changes, "model_args": {"moe_aux_loss_coef": 0.1}}})
    with pytest.raises(UserError, match=reason):
        check_engine(parse_config(values), "actor_train")


def test_a_model_without_a_router_is_an_error_before_the_run(base):
    llama = base["output_dir"].removesuffix("out") + "llama"
    values = merge(base, {"pretrain": llama, "actor_train": {"model_args": {"moe_aux_loss_coef": 0.1}}})
    with pytest.raises(UserError, match="this one is llama; remove it"):
        check_engine(parse_config(values), "actor_train")
