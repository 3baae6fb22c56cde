"""Reward models: against transformers and TRL, trained to separate, exported, and as a judge."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from tests.support.paths import ROOT
from tests.support.tiny_chat_model import save_tiny_chat_model
from tests.support.tiny_models import FAMILIES, VOCAB
from thresher.builders.engines import check_model
from thresher.builders.export import export_checkpoint
from thresher.builders.inputs import RunInputs
from thresher.builders.objective import build_objective
from thresher.builders.samples import build_judge
from thresher.checkpoint.manager import latest
from thresher.config import parse_config
from thresher.config.roles import TrainingArgs
from thresher.data.example import Example, ExampleBatch
from thresher.engines.accumulate import MicroBatch
from thresher.engines.native.build import infer_engine, train_engine
from thresher.errors import UserError
from thresher.losses import Objective, make_loss
from thresher.models.forward_check import LayoutError, check_logps
from thresher.models.layouts import Layout, ModelInputs, PackedLayout, PaddedLayout
from thresher.models.loading.load import load_model
from thresher.models.loading.load_sharded import build_on_meta, build_without_weights, load_local_shards
from thresher.models.logps import PairModel
from thresher.pipeline import DPOPipeline
from thresher.sampling.answers import Answer, SampledPrompt

LAYOUTS: dict[str, Layout] = {
    "shared": PackedLayout(True, scored="end"),
    "packed": PackedLayout(False, scored="end"),
    "padded": PaddedLayout(pad_id=0, scored="end"),
}
CENTER = 0.01
MARGINS = (0.0, 1.5, -0.5, 0.25)


def reward_model() -> PreTrainedModel:
    """A tiny Llama with a random head, in fp32."""
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES["llama"])
    config.num_labels = 1
    return LlamaForSequenceClassification(config).eval()


def pairs() -> list[Example]:
    draw = np.random.default_rng(0)

    def ids(most: int) -> np.ndarray:
        return draw.integers(3, VOCAB, draw.integers(1, most + 1)).astype(np.int32)

    return [Example.pair(ids(6), ids(9), ids(9), margin=margin) for margin in MARGINS]


def some_pairs() -> ExampleBatch:
    return ExampleBatch(np.arange(len(MARGINS)), tuple(pairs()))


def sequences() -> list[list[int]]:
    """The chosen sequences, then the rejected ones."""
    return [[*p.prompt_ids.tolist(), *p.responses[side].ids.tolist()] for side in (0, 1) for p in pairs()]


def step(layout: Layout, split: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, float]]:
    objective = Objective(((make_loss("bradley_terry", {"center_rewards_coefficient": CENTER}), 1.0),))
    engine = train_engine(reward_model(), layout, torch.float32, TrainingArgs(learning_rate=1e-3))
    examples, micro_batches, start = pairs(), [], 0
    for size in split:
        batch = ExampleBatch(np.arange(start, start + size), tuple(examples[start : start + size]))
        micro_batches.append(MicroBatch(batch, None))
        start += size
    metrics, _, _ = engine.accumulate(micro_batches, objective, len(examples))
    gradients = {name: each.grad for name, each in engine.model.named_parameters() if each.grad is not None}
    return gradients, {name: metric.mean for name, metric in metrics.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [(4,), (1, 3)], ids=str)
def test_a_step_is_the_formula_over_the_scores_of_transformers(layout, split):
    model = reward_model()
    rewards = torch.cat([model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences()])
    chosen, rejected = rewards.chunk(2)
    loss = (-F.logsigmoid(chosen - rejected - torch.tensor(MARGINS)) + CENTER * (chosen + rejected) ** 2).mean()
    loss.backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    found, metrics = step(LAYOUTS[layout], split)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-6)
    assert metrics["rewards/accuracies"] == (chosen > rejected).float().mean().item()
    assert not [name for name in metrics if not name.startswith(("loss", "rewards/"))]


def test_loss_and_gradients_are_those_of_trl(tmp_path):
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    rows = {
        "chosen_ids": sequences()[:4],
        "rejected_ids": sequences()[4:],
        "margin": list(MARGINS),
    }
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_chat_model(tmp_path / "tokenizer"))
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # no sequence has it
    trainer = RewardTrainer(
        reward_model(),
        RewardConfig(
            str(tmp_path / "out"),
            center_rewards_coefficient=CENTER,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
    )
    inputs = trainer.data_collator([trainer.train_dataset[at] for at in range(4)])
    model = trainer.model.eval()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    found, metrics = step(LAYOUTS["shared"], (2, 2))
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=0, msg=name)


def test_a_reward_depends_on_its_own_response_and_all_of_it():
    (first, *_), model = pairs(), reward_model()

    def rewards(example: Example) -> list[float]:
        scored = infer_engine(model, LAYOUTS["shared"], torch.float32).score(ExampleBatch(np.arange(1), (example,)))
        return [side.sums().item() for side in scored.sides]

    before = rewards(first)
    for changed in (0, 1):
        for at in (0, -1):
            responses = list(first.responses)
            ids = responses[changed].ids.copy()
            ids[at] = (ids[at] + 1) % VOCAB
            responses[changed] = responses[changed]._replace(ids=ids)
            after = rewards(Example(first.prompt_ids, tuple(responses)))
            assert [one == pytest.approx(other, abs=1e-7) for one, other in zip(before, after, strict=True)] == [
                side != changed for side in (0, 1)
            ]


def test_a_new_head_starts_with_zeros_and_an_old_one_is_kept_however_it_is_loaded(tmp_path):
    path = save_tiny_chat_model(tmp_path / "causal")

    def head_of(directory: Path) -> list[Tensor]:
        sharded = build_on_meta(str(directory), dtype=torch.float32, is_reward_model=True)
        load_local_shards(sharded, str(directory), torch.device("cpu"))
        loaded = load_model(str(directory), is_reward_model=True)
        assert all(map(torch.equal, loaded.state_dict().values(), sharded.state_dict().values()))
        return [loaded.score.weight, sharded.score.weight]

    assert [weight.norm().item() for weight in head_of(path)] == [0.0, 0.0]
    model = reward_model()
    model.save_pretrained(tmp_path / "rewards")
    assert all(torch.equal(weight, model.score.weight) for weight in head_of(tmp_path / "rewards"))


def test_the_start_up_check_takes_the_last_token_even_if_it_is_the_pad_token():
    model = reward_model()
    model.config.pad_token_id = int(pairs()[0].chosen.ids[-1])
    check_logps(PairModel.for_layout(model, torch.float32, LAYOUTS["shared"]), LAYOUTS["shared"], some_pairs())
    assert model.config.pad_token_id == pairs()[0].chosen.ids[-1]


class _Stretched(PackedLayout):
    """Doubles every position."""

    def collate(self, batch: ExampleBatch) -> ModelInputs:
        inputs = super().collate(batch)
        inputs.model_inputs["position_ids"] *= 2
        return inputs


def test_the_start_up_check_rejects_wrong_positions_under_a_head_of_zeros():
    model = reward_model()
    torch.nn.init.zeros_(model.score.weight)
    check_logps(PairModel.for_layout(model, torch.float32, LAYOUTS["shared"]), LAYOUTS["shared"], some_pairs())
    wrong = _Stretched(True, scored="end")
    with pytest.raises(LayoutError, match="rewards of layout `shared` differ from the model's original forward"):
        check_logps(PairModel.for_layout(model, torch.float32, wrong), wrong, some_pairs())


def polite(directory: Path, **changes: Any) -> dict[str, Any]:
    """A run on the quickstart's pairs."""
    quickstart = ROOT / "examples" / "quickstart"
    data = {"template": "raw"}
    return {
        "exp_name": "rewards",
        "output_dir": str(directory / "out"),
        "pretrain": str(save_tiny_chat_model(directory / "model")),
        "pref_loss": "bradley_terry",
        "max_steps": 120,
        "save_steps": 60,
        "sequence_length": 512,
        "track_with": [],
        "actor_train": {
            "model_args": {"dtype": "fp32", **changes},
            "data_args": {"file_name": str(quickstart / "train.jsonl"), **data},
            "training_args": {"learning_rate": 2e-3, "global_batch_size": 16},
        },
        "validation": {"data_args": {"file_name": str(quickstart / "validation.jsonl"), **data}},
        "eval_steps": 60,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, float]]:
    """A finished run and its last metrics."""
    values = polite(tmp_path_factory.mktemp("rewards"))
    return values, DPOPipeline(parse_config(values)).run()


@pytest.mark.slow
def test_held_out_pairs_are_told_apart(trained):
    _, metrics = trained
    accuracy = metrics["eval/rewards/accuracies"]
    print(f"held-out accuracy: {accuracy:.3f}")
    assert accuracy >= 0.9


@pytest.mark.slow
def test_an_export_has_the_same_scores_in_plain_transformers(trained, tmp_path):
    values, metrics = trained
    export_checkpoint(latest(Path(values["output_dir"]) / "checkpoints"), tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in Path(values["validation"]["data_args"]["file_name"]).read_text().splitlines()]
    texts = [row["prompt"] + row[side] + tokenizer.eos_token for side in ("chosen", "rejected") for row in rows]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        chosen, rejected = model(**inputs).logits.squeeze(1).chunk(2)
    (record,) = [
        record
        for line in (Path(values["output_dir"]) / "logs" / "eval_pairs.jsonl").read_text().splitlines()
        if (record := json.loads(line))["step"] == values["max_steps"]
    ]
    for name, expected in (("chosen", chosen), ("rejected", rejected)):
        in_order = expected[record["pairs"]].tolist()
        assert record[f"rewards/{name}"] == pytest.approx(in_order, abs=1e-4)
    assert metrics["eval/rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-4)
    assert metrics["eval/rewards/rejected"] == pytest.approx(rejected.mean().item(), abs=1e-4)
    assert metrics["eval/rewards/accuracies"] == pytest.approx((chosen > rejected).float().mean().item())


@pytest.mark.slow
def test_an_export_has_no_pad_token_where_eos_is_the_only_special_token(tmp_path):
    """transformers takes the reward at the last token that is no padding."""
    values = polite(tmp_path) | {"max_steps": 1, "save_steps": 1}
    tokenizer = AutoTokenizer.from_pretrained(values["pretrain"], bos_token=None, pad_token="<|im_end|>")
    tokenizer.save_pretrained(values["pretrain"])
    config = AutoConfig.from_pretrained(values["pretrain"], pad_token_id=tokenizer.eos_token_id)
    config.save_pretrained(values["pretrain"])
    DPOPipeline(parse_config(values)).run()
    export_checkpoint(latest(Path(values["output_dir"]) / "checkpoints"), tmp_path / "rewards")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rewards", dtype=torch.float32).eval()
    ids = [7, 8, 9, tokenizer.eos_token_id]
    torch.nn.init.normal_(model.score.weight)
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert model(torch.tensor([ids])).logits.item() == pytest.approx(model.score(hidden).item(), abs=1e-6)


@pytest.mark.slow
def test_an_export_judges_samples_of_a_policy_with_the_same_tokenizer(trained, tmp_path):
    values, _ = trained
    export_checkpoint(latest(Path(values["output_dir"]) / "checkpoints"), tmp_path / "rewards")
    policy = {
        **values,
        "pref_loss": "sigmoid",
        "output_dir": str(tmp_path / "out"),
        "max_steps": 2,
        "eval_steps": 2,
        "save_steps": 2,
        "samples": {"judge": str(tmp_path / "rewards"), "num_prompts": 3, "max_new_tokens": 8},
    }
    metrics = DPOPipeline(parse_config(policy)).run()
    assert 0.0 <= metrics["samples/win_rate"] <= 1.0
    assert {"samples/reward", "samples/reward_reference"} <= metrics.keys()
    judge = build_judge(parse_config(policy))
    polite_answer, rude = (Answer("", tuple(range(5, 5 + length)), True) for length in (3, 6))
    (verdict,) = judge.verdicts([SampledPrompt("", polite_answer, rude, 0.0, (7, 8))])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rewards", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([[7, 8, *each.token_ids]])).logits.item() for each in (polite_answer, rude)]
    assert verdict.rewards == pytest.approx(expected, abs=1e-6)
    policy["samples"]["judge"] = values["pretrain"]
    with pytest.raises(UserError, match=r"is not a reward model: its weight files have no score\.weight"):
        build_judge(parse_config(policy))


@pytest.mark.slow
def test_adapters_are_trained_with_the_head_and_merged_for_export(tmp_path):
    values = polite(tmp_path, lora_rank=8, lora_target=["all-linear"]) | {"max_steps": 6, "save_steps": 6}
    metrics = DPOPipeline(parse_config(values)).run()
    export_checkpoint(latest(Path(values["output_dir"]) / "checkpoints"), tmp_path / "merged")
    model = load_model(str(tmp_path / "merged"), is_reward_model=True)
    assert model.score.weight.norm() > 0
    validation = RunInputs(parse_config(values)).validation
    engine = infer_engine(model, LAYOUTS["shared"], torch.float32)
    scored = engine.score(
        ExampleBatch(np.arange(len(validation)), tuple(validation[i] for i in range(len(validation))))
    )
    assert metrics["eval/rewards/margins"] == pytest.approx(
        (scored.chosen.sums() - scored.rejected.sums()).mean().item(), abs=1e-4
    )


def test_megatron_refuses_reward_models(tmp_path):
    values = polite(tmp_path)
    values["actor_train"]["strategy_args"] = {"strategy_name": "megatron_train"}
    config = parse_config(values)
    with pytest.raises(UserError, match="actor_train: megatron_train does not train reward models; use fsdp2_train"):
        check_model(config, "actor_train", config.actor_train)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pref_loss": {"bradley_terry": 1.0, "sft": 0.1}}, "has no log-probabilities for sft; train it alone"),
        ({"pref_loss": "bradley_terry", "rpo_alpha": 1.0}, "has no log-probabilities for rpo_alpha; train it alone"),
        ({"pref_loss": "bradley_terry", "ld_alpha": 0.5}, "ld_alpha .* has no effect on bradley_terry"),
        ({"pref_loss": "bradley_terry", "apply_loss_mask": False}, "apply_loss_mask has no effect"),
        (
            {"pref_loss": "bradley_terry", "samples": {"prompts_file": "prompts.txt"}},
            "a reward model writes no answers",
        ),
        ({"pref_loss": "bradley_terry", "beta": 0.1}, "bradley_terry has no parameter beta"),
    ],
)
def test_settings_without_effect_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        build_objective(parse_config({"pretrain": "model", "output_dir": "out", **changes}))


def test_a_family_without_sequence_classification_is_named_as_such(tmp_path):
    FAMILIES["granite"].save_pretrained(tmp_path)
    with pytest.raises(UserError, match="transformers has no sequence-classification model of its type"):
        build_without_weights(str(tmp_path), dtype=torch.float32, is_reward_model=True)


def test_the_head_cannot_be_frozen(tmp_path):
    inputs = RunInputs(parse_config(polite(tmp_path, freeze_module_prefix="score")))
    with pytest.raises(UserError, match="freezes the head of the reward model"):
        _ = inputs.policy
