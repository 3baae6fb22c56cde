"""Each kind of adapter starts at margin 0, trains like plain PEFT, is exported for plain PEFT and resumed bitwise."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.config.test_config_keys import refusal
from tests.support.compared_runs import merge
from tests.support.engines.adapters import save_adapter
from tests.support.engines.parity import save_model
from tests.support.hub_server import card_errors
from tests.support.real_pairs import minimal_dpo
from tests.support.small_runs import assert_same_weights, make_base, save_small_tokenizer
from tests.support.tiny_llama import VOCAB
from tests.support.tiny_run import build_run, noise_pairs
from thresher.builders.engines import build_policy, check_engine, trained_parts
from thresher.builders.export import export_adapter, export_checkpoint
from thresher.builders.gguf import find_converter
from thresher.builders.inputs import RunInputs, find_layout
from thresher.cli import app
from thresher.config import DPOConfig, parse_config
from thresher.errors import UserError
from thresher.models.loading.load_sharded import build_without_weights
from thresher.models.logps import original_forward
from thresher.pipeline import DPOPipeline

IDS = torch.tensor([[1, 5, 9, 33, 7, 12]])
LEARNING_RATE, EPSILON = 1e-3, 1e-3  # a small one would amplify rounding noise
# setting of a run, and what PEFT calls it
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rslora": ({"use_rslora": True}, {"use_rslora": True}),
    "dora": ({"use_dora": True}, {"use_dora": True}),
    "patterns": (
        {"lora_rank_pattern": {"q_proj": 1, r"layers\.0\..*v_proj": 4}, "lora_alpha_pattern": {"k_proj": 1.0}},
        {"rank_pattern": {"q_proj": 1, r"layers\.0\..*v_proj": 4}, "alpha_pattern": {"k_proj": 1.0}},
    ),
    "exclude": ({"lora_exclude": ["o_proj", "up_proj"]}, {"exclude_modules": ["o_proj", "up_proj"]}),
    "modules": (
        {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
        {"modules_to_save": ["lm_head", "embed_tokens", "norm"], "ensure_weight_tying": True},
    ),
    "dora and a module of a layer": (
        {"use_dora": True, "modules_to_save": ["v_proj"]},
        {"use_dora": True, "modules_to_save": ["v_proj"]},
    ),
}
INITS = {"pissa": ({"lora_init": "pissa"}, {}), "olora": ({"lora_init": "olora", "use_rslora": True}, {})}
# what is trained whole may be tied
CASES = [*((kind, "llama") for kind in KINDS), ("modules", "tied")]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Models `llama`, `tied` and `other`, and rows."""
    directory = tmp_path_factory.mktemp("kinds")
    (directory / "base.json").write_text(json.dumps(make_base(directory)))
    shutil.move(directory / "policy", directory / "llama")
    shutil.move(directory / "reference", directory / "other")
    save_small_tokenizer(
        save_model(directory / "tied", "llama", seed=0, num_layers=2, vocab_size=VOCAB, tie_word_embeddings=True)
    )
    return directory


def values_of(root: Path, base: str, output: Path, **model_args: Any) -> dict[str, Any]:
    """A run of one step whose reference is the policy's model."""
    training = {"lr_scheduler_type": "constant", "learning_rate": LEARNING_RATE, "adam_epsilon": EPSILON}
    changes = {
        "pretrain": str(root / base),
        "max_steps": 1,
        "save_steps": 0,
        "eval_steps": 0,
        "reference": {},
        "output_dir": str(output),
        "cache_dir": str(output / "cache"),
        "actor_train": {"model_args": model_args, "training_args": training | {"global_batch_size": 8}},
    }
    values = merge(json.loads((root / "base.json").read_text()) | {"reference": {}}, changes)
    return {name: value for name, value in values.items() if name != "validation"}


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def logits_of_policy(config: DPOConfig, checkpoint: Path | None = None) -> torch.Tensor:
    policy = build_policy(config, find_layout(config)[1])
    if checkpoint is not None:
        policy.load(checkpoint)
    with original_forward(policy.model):
        return logits_of(policy.model)


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def save_random_adapter(directory: Path, base: Path, **settings: Any) -> Path:
    return save_adapter(directory, base, std=0.1, **({"target_modules": "all-linear"} | settings))


@pytest.mark.parametrize(("kind", "base"), CASES)
def test_a_new_adapter_starts_at_margin_0_and_leaves_its_base(root, tmp_path, kind, base):
    run = build_run(values_of(root, base, tmp_path, lora_rank=2, **KINDS[kind][0]), noise_pairs(8))
    assert run.mode == "adapter"
    metrics = run.trainer.training_step()
    assert metrics["rewards/margins"].mean == pytest.approx(0.0, abs=1e-7)
    assert metrics["loss"].mean == pytest.approx(math.log(2), abs=1e-7)
    policy = run.trainer.engine
    with original_forward(policy.model):
        assert (logits_of(policy.model) - logits_of(plain(root / base))).abs().max() > 1e-5
        with policy.model.disable_adapter():
            assert torch.equal(logits_of(policy.model), logits_of(plain(root / base)))


@pytest.mark.parametrize(("kind", "base"), CASES)
def test_a_continued_adapter_steps_like_plain_peft(root, tmp_path, kind, base):
    adapter = save_random_adapter(tmp_path / "adapter", root / base, **KINDS[kind][1])
    train = noise_pairs(8)
    run = build_run(values_of(root, base, tmp_path / "run", adapter_name_or_path=str(adapter)), train)
    theirs = PeftModel.from_pretrained(plain(root / base), adapter, is_trainable=True).eval()
    reference = PeftModel.from_pretrained(plain(root / base), adapter)
    policy = run.trainer.engine
    with original_forward(policy.model):
        torch.testing.assert_close(logits_of(policy.model), logits_of(theirs), atol=1e-5, rtol=0)
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0)
    examples = [
        (pair.prompt_ids.tolist(), pair.chosen.ids.tolist(), pair.rejected.ids.tolist()) for pair in train.pairs
    ]
    found = run.trainer.training_step()
    expected = minimal_dpo().train_step(theirs, reference, optimizer, examples)
    assert found["rewards/margins"].mean == pytest.approx(0.0, abs=1e-5)
    assert found["loss"].mean == pytest.approx(expected["loss"], abs=1e-5)
    weights = {name: each for name, each in theirs.named_parameters() if each.requires_grad}
    assert policy.weights().keys() == weights.keys()
    for name, weight in policy.weights().items():
        torch.testing.assert_close(weight, weights[name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(("kind", "base"), [*CASES, *((init, "llama") for init in INITS)])
def test_an_exported_adapter_loads_with_plain_peft(root, tmp_path, kind, base, caplog):
    settings = (KINDS | INITS)[kind][0]
    config = parse_config(values_of(root, base, tmp_path / "run", lora_rank=2, **settings))
    DPOPipeline(config).run()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    export_checkpoint(checkpoint, tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        export_adapter(checkpoint, tmp_path / "adapter")
    trained = logits_of_policy(config, checkpoint)
    assert (trained - logits_of(plain(root / base))).abs().max() > 1e-4
    torch.testing.assert_close(logits_of(plain(tmp_path / "model")), trained, atol=1e-5, rtol=0)
    theirs = PeftModel.from_pretrained(plain(root / base), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(theirs), trained, atol=1e-5, rtol=0)
    assert ("vLLM does not support" in caplog.text) == (kind not in {"rslora", "exclude", *INITS})
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(root / base)
    assert (tmp_path / "adapter" / "tokenizer.json").is_file()
    # and here
    again = values_of(root, base, tmp_path / "again", adapter_name_or_path=str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of_policy(parse_config(again)), trained, atol=1e-5, rtol=0)


def test_dora_and_modules_trained_whole_resume_bitwise(root, tmp_path):
    settings = {"lora_rank": 2, "use_dora": True, "modules_to_save": ["lm_head", "norm"], "lora_dropout": 0.1}
    checkpoint = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    for name, resumed in (("whole", {}), ("resumed", {"resume_from_checkpoint": checkpoint})):
        values = values_of(root, "tied", tmp_path / name, **settings) | {"max_steps": 4, "save_steps": 2}
        DPOPipeline(parse_config(values | resumed)).run()
    assert_same_weights(tmp_path / "whole", tmp_path / "resumed")


def test_all_that_is_trained_is_counted(root, tmp_path):
    """Without loading weights, as `thresher plan` and the token budget do."""

    def trained(**settings: Any) -> int:
        config = parse_config(values_of(root, "tied", tmp_path, lora_rank=2, **settings))
        return RunInputs(config).num_parameters[1]

    model = build_without_weights(str(root / "tied"), dtype=torch.float32)
    lora, rows = trained(), sum(each.weight.shape[0] for each in linear_in_layers(model))
    assert trained(use_dora=True) - lora == rows
    assert trained(modules_to_save="lm_head,model.norm") - lora == sum(
        each.numel()
        for name, each in model.named_parameters()
        if name.endswith(("embed_tokens.weight", "model.norm.weight"))
    )
    assert trained(use_rslora=True) == lora
    assert trained(lora_rank_pattern={".*": 4}) == 2 * lora


def linear_in_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [each for each in model.model.layers.modules() if isinstance(each, torch.nn.Linear)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_exclude": ["qqq"]}, r"lora_exclude \['qqq'\] matches no module of this model"),
        ({"modules_to_save": ["qqq"]}, r"modules_to_save \['qqq'\] matches no module of this model"),
        (
            {"lora_rank_pattern": {"qqq": 2}},
            "the key qqq of lora_rank_pattern or lora_alpha_pattern matches no adapter",
        ),
        ({"lora_alpha_pattern": {"lm_head": 2}}, "the key lm_head of lora_rank_pattern or"),
        ({"modules_to_save": ["ayers"]}, r"modules_to_save \['ayers'\] is not possible"),
        ({"modules_to_save": ["lp"]}, "mlp is in modules_to_save and has adapters; name it in lora_exclude"),
        ({"modules_to_save": ["layers"]}, "lora_exclude and modules_to_save leave nothing of lora_target"),
        ({"use_dora": True, "lora_target": ["embed_tokens"]}, "embed_tokens is not; exclude it"),
    ],
)
def test_settings_that_the_model_cannot_have_are_rejected(root, tmp_path, settings, reason):
    config = parse_config(values_of(root, "llama", tmp_path, lora_rank=2, **settings))
    with pytest.raises(UserError, match=reason):
        _ = RunInputs(config).policy


def test_an_adapter_that_unties_its_model_is_rejected(root, tmp_path):
    adapter = save_random_adapter(tmp_path / "adapter", root / "tied", modules_to_save=["lm_head"])
    config = parse_config(values_of(root, "tied", tmp_path / "run", adapter_name_or_path=str(adapter)))
    with pytest.raises(UserError, match="trains embedding and head of a model that ties them apart from each other"):
        build_policy(config, find_layout(config)[1])


@pytest.mark.parametrize(
    ("settings", "mesh", "reason"),
    [
        ({"use_dora": True}, {"tp_size": 2}, "use_dora needs whole rows of the weights, which tp_size splits"),
        ({"modules_to_save": ["lm_head"]}, {"tp_size": 2}, "is not supported with tp_size; remove tp_size"),
        ({"modules_to_save": ["lm_head"]}, {"pp_size": 2}, "is not supported with pp_size; remove pp_size"),
    ],
)
def test_meshes_that_split_whole_rows_or_modules_are_rejected(root, tmp_path, settings, mesh, reason):
    values = values_of(root, "llama", tmp_path, lora_rank=2, **settings)
    workers = {"num_workers": 2, "strategy_args": {"strategy_config": mesh}}
    with pytest.raises(UserError, match=reason):
        check_engine(parse_config(merge(values, {"actor_train": workers})), "actor_train")
    check_engine(parse_config(merge(values, {"actor_train": {"num_workers": 2}})), "actor_train")


def test_settings_that_contradict_each_other_are_rejected():
    def problem(**settings: Any) -> str:
        return refusal({"actor_train": {"model_args": settings}})

    assert "use_dora measures the weights that lora_init pissa changes" in problem(
        lora_rank=2, use_dora=True, lora_init="pissa"
    )
    assert "use_dora, modules_to_save have no effect with adapter_name_or_path" in problem(
        adapter_name_or_path="a", use_dora=True, modules_to_save=["lm_head"]
    )
    assert "use_rslora, lora_exclude have no effect without lora_rank" in problem(
        use_rslora=True, lora_exclude="o_proj"
    )


def test_the_head_of_a_reward_model_is_not_named(root, tmp_path):
    values = values_of(root, "llama", tmp_path, lora_rank=2, modules_to_save=["score"]) | {"pref_loss": "bradley_terry"}
    with pytest.raises(UserError, match="modules_to_save names the head of the reward model, which is trained anyway"):
        _ = RunInputs(parse_config(values)).policy
    DPOPipeline(parse_config(merge(values, {"actor_train": {"model_args": {"modules_to_save": []}}}))).run()
    with pytest.raises(UserError, match="trained the head of a reward model too, so its adapter cannot be exported"):
        export_adapter(tmp_path / "checkpoints" / "step-00000001", tmp_path / "adapter")
    with pytest.raises(UserError, match=r"llama.cpp has no reward models of transformers; leave --gguf out"):
        find_converter(tmp_path, tmp_path / "checkpoints" / "step-00000001", None, tmp_path / "x.gguf", None)


def test_an_adapter_is_merged_into_a_different_model_with_a_warning(root, tmp_path, caplog):
    config = parse_config(values_of(root, "llama", tmp_path / "run", lora_rank=2))
    DPOPipeline(config).run()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    export_adapter(checkpoint, tmp_path / "adapter")
    with caplog.at_level(logging.WARNING):
        export_checkpoint(checkpoint, tmp_path / "model", merge_into=str(root / "other"))
    assert f"the adapter was trained on {root / 'llama'} and is merged into {root / 'other'}" in caplog.text
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("adapter", "model")}
    assert not any(card_errors(card) or str(tmp_path) in card or str(root) in card for card in cards.values())
    assert "library_name: peft" in cards["adapter"]
    assert "A LoRA adapter for `llama`" in cards["adapter"]
    assert 'AutoPeftModelForCausalLM.from_pretrained("adapter")' in cards["adapter"]
    assert "`other` with an adapter merged into it that was trained on `llama`" in cards["model"]
    assert "## Evaluation" not in cards["model"]
    expected = PeftModel.from_pretrained(plain(root / "other"), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(plain(tmp_path / "model")), logits_of(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({}, "has no adapter, so there"), ({"lora_rank": 2, "lora_init": "pissa"}, "lora_init pissa, whose adapter")],
)
def test_what_cannot_be_merged_into_a_different_model_is_an_error(root, tmp_path, settings, why):
    DPOPipeline(parse_config(values_of(root, "llama", tmp_path / "run", **settings))).run()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    with pytest.raises(UserError, match=why):
        export_checkpoint(checkpoint, tmp_path / "model", merge_into=str(root / "other"))
    if not settings:
        with pytest.raises(UserError, match="has no adapter, so its adapter cannot be exported"):
            export_adapter(checkpoint, tmp_path / "adapter")


def test_the_command_exports_one_of_both_and_replaces_the_other(root, tmp_path):
    from typer.testing import CliRunner

    DPOPipeline(parse_config(values_of(root, "llama", tmp_path / "run", lora_rank=2))).run()
    command = ["export", str(tmp_path / "run"), "-o", str(tmp_path / "out")]

    def names() -> set[str]:
        return {file.name for file in (tmp_path / "out").iterdir()}

    for options, has in (["--merge"], "config.json"), (["--adapter", "--overwrite"], "adapter_config.json"):
        assert CliRunner().invoke(app, [*command, *options], catch_exceptions=False).exit_code == 0
        assert names() & {"config.json", "adapter_config.json"} == {has}
    assert {"adapter_model.safetensors"} == {name for name in names() if name.endswith(".safetensors")}
    refused = CliRunner().invoke(app, [*command, "--adapter", "--push", "someone/tiny"])
    assert "an adapter names its base, and the run's is a directory of this machine" in str(refused.exception)


def test_trained_parts_of_an_adapter_on_disk_keep_its_kind(root, tmp_path):
    adapter = save_random_adapter(tmp_path, root / "llama", use_dora=True, modules_to_save=["lm_head"])
    args = parse_config(values_of(root, "llama", tmp_path, adapter_name_or_path=str(adapter))).actor_train.model_args
    files = trained_parts(args).adapter
    assert files is not None
    assert files.use_dora
    assert list(files.modules_to_save) == ["lm_head"]
