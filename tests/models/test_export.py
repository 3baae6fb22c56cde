"""`thresher export` writes a model that plain transformers loads and that gives the policy's logits."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.stateful_models import STATEFUL
from tests.support.tiny_chat_model import quickstart_rows
from tests.support.tiny_models import EXPERT_FAMILIES, FAMILIES
from thresher.builders.engines import build_policy
from thresher.builders.export import export_adapter, export_checkpoint
from thresher.builders.inputs import find_layout
from thresher.checkpoint.json_io import save_json
from thresher.checkpoint.manifest import read_manifest, record_files, write_manifest
from thresher.config import DPOConfig, parse_config
from thresher.errors import CheckpointError, UserError
from thresher.models.logps import original_forward
from thresher.pipeline import DPOPipeline

KINDS = {
    "all weights": {},
    "lora": {"lora_rank": 4},
    "lora on two modules": {"lora_rank": 2, "lora_target": ["q_proj"]},
    "lora on 4 bits": {"lora_rank": 4, "quantization": {"bits": 4}},
    "lora on 8 bits": {"lora_rank": 4, "quantization": {"bits": 8}},
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def trained(request, tiny_dir, tmp_path_factory):
    """The config and the last checkpoint of a run of two large steps."""
    return train(tiny_dir, tmp_path_factory.mktemp("run"), request.param)


def train(model: Path, directory: Path, model_args: dict) -> tuple[DPOConfig, Path]:
    (directory / "rows.json").write_text(json.dumps(quickstart_rows(16)))
    config = parse_config(
        {
            "pretrain": str(model),
            "output_dir": str(directory),
            "max_steps": 2,
            "track_with": [],
            "actor_train": {
                "model_args": {"dtype": "fp32", **model_args},
                "data_args": {"file_name": str(directory / "rows.json"), "template": "raw"},
                "training_args": {"learning_rate": 0.01, "lr_scheduler_type": "constant"},
            },
        }
    )
    DPOPipeline(config).run()
    return config, directory / "checkpoints" / "step-00000002"


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("export") / "model"
    export_checkpoint(trained[1], output)
    return output


@pytest.fixture(scope="module")
def ids(tiny_dir) -> torch.Tensor:
    return AutoTokenizer.from_pretrained(tiny_dir)("Once upon a time there was a", return_tensors="pt")["input_ids"]


def test_plain_transformers_gives_the_logits_of_the_policy(trained, exported, tiny_dir, ids):
    check_logits(trained, exported, tiny_dir, ids)


def check_logits(trained, exported: Path, base: Path, ids: torch.Tensor) -> None:
    config, checkpoint = trained
    policy = build_policy(config, find_layout(config)[1])
    policy.load(checkpoint)
    exported_model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    initial = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad(), original_forward(policy.model):
        logits = policy.model.eval()(input_ids=ids).logits
        # merging rounds each weight once more, so a few LoRA logits change by slightly more than 1e-5
        torch.testing.assert_close(exported_model(input_ids=ids).logits, logits, atol=2e-5, rtol=1e-5)
        assert (initial(input_ids=ids).logits - logits).abs().max() > 0.01  # training changed the weights


def test_the_directory_holds_only_a_plain_model_and_its_tokenizer(exported, tiny_dir):
    assert {path.name for path in exported.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((exported / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["dtype"] == "float32"
    for trace in ("thresher", "lora", "peft", "quantization"):
        assert trace not in (exported / "config.json").read_text()
    original = load_file(tiny_dir / "model.safetensors")
    assert load_file(exported / "model.safetensors").keys() == original.keys()
    assert not [path for path in exported.parent.iterdir() if path != exported]  # no staging directory is left


def test_the_card_of_an_adapter_states_the_quantization_of_its_base(trained, tmp_path):
    config, checkpoint = trained
    args = config.actor_train.model_args
    if not args.has_adapter:
        with pytest.raises(UserError, match="has no adapter"):
            export_adapter(checkpoint, tmp_path / "adapter")
        return
    export_adapter(checkpoint, tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    bits = 0 if args.quantization is None else args.quantization.bits
    assert (f"The adapter belongs to its base in {bits} bits" in card) == ("BitsAndBytesConfig" in card) == (bits > 0)


def test_the_exported_model_generates(exported, ids):
    model = AutoModelForCausalLM.from_pretrained(exported)
    out = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape == (1, ids.shape[1] + 4)
    assert AutoTokenizer.from_pretrained(exported).decode(out[0])


def test_the_precision_can_be_chosen(trained, tmp_path):
    export_checkpoint(trained[1], tmp_path / "half", dtype="bf16")
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_directory_that_is_not_empty_is_not_changed(trained, exported):
    before = (exported / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="model is not an empty directory; name a new one"):
        export_checkpoint(trained[1], exported)
    assert (exported / "model.safetensors").read_bytes() == before


def test_an_existing_file_is_not_overwritten(trained, tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(UserError, match="model is not an empty directory; name a new one"):
        export_checkpoint(trained[1], tmp_path / "model")


def test_a_corrupt_checkpoint_is_not_exported(trained, tmp_path):
    copy = shutil.copytree(trained[1], tmp_path / "step-00000002")
    weights = bytearray((copy / "weights.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "weights.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        export_checkpoint(copy, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_another_base_model_is_not_exported(trained, exported, tiny_dir, tmp_path):
    """A checkpoint of LoRA lacks the weights of the base, and every checkpoint lacks config.json."""
    config, _ = trained
    model, run = shutil.copytree(tiny_dir, tmp_path / "model"), tmp_path / "run"
    shutil.copytree(Path(config.output_dir), run)
    checkpoint = run / "checkpoints" / "step-00000002"
    settings = json.loads((checkpoint / "config.json").read_text()) | {"pretrain": str(model)}
    rewrite(checkpoint, "config.json", settings)
    export_checkpoint(checkpoint, tmp_path / "same")
    assert load_equal(tmp_path / "same", exported)

    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    save_file(weights | {name: weights[name] * 2}, model / "model.safetensors", metadata={"format": "pt"})
    if config.freezes_weights:
        digests = r"the digest of the policy's frozen weights was [0-9a-f]{64}, is [0-9a-f]{64}; put the original model"
        with pytest.raises(CheckpointError, match=digests):
            export_checkpoint(checkpoint, tmp_path / "other")
    else:  # all weights are in the checkpoint
        export_checkpoint(checkpoint, tmp_path / "all")
        assert load_equal(tmp_path / "all", exported)

    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    changed = json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (model / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"the policy's config.json was [0-9a-f]{64}, is [0-9a-f]{64}; put"):
        export_checkpoint(checkpoint, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_without_digests_is_exported_with_a_warning(trained, tmp_path, caplog):
    """Up to 0.2."""
    config, checkpoint = trained
    copy = shutil.copytree(checkpoint, tmp_path / "step-00000002")
    progress = json.loads((copy / "trainer.json").read_text())
    rewrite(copy, "trainer.json", {name: value for name, value in progress.items() if name != "identity"})
    export_checkpoint(copy, tmp_path / "model")
    assert caplog.text.count("a change of it is not detected") == 1 + config.freezes_weights


def rewrite(checkpoint: Path, name: str, content: dict) -> None:
    """Replace a file of a checkpoint, and its entry in the manifest."""
    save_json(checkpoint / name, content)
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, files=record_files(checkpoint, list(manifest.files))))


def load_equal(one: Path, other: Path) -> bool:
    first, second = (load_file(path / "model.safetensors") for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_can_be_written_in_several_files(trained, exported, tmp_path):
    export_checkpoint(trained[1], tmp_path / "sharded", max_shard_size="100KB")
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 1
    whole = load_file(exported / "model.safetensors")
    parts = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    with pytest.raises(UserError, match="the shard size 'huge' is not a number with a unit; write it like"):
        export_checkpoint(trained[1], tmp_path / "other", max_shard_size="huge")


def test_the_current_directory_is_not_replaced(trained, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=r"an export cannot replace the directory \.; name a new one below it"):
        export_checkpoint(trained[1], Path())


def test_a_run_exports_its_model_at_the_end_if_asked(trained, exported, tmp_path):
    config, _ = trained
    run = shutil.copytree(config.output_dir, tmp_path / "run")
    asked = config.model_copy(update={"output_dir": str(run), "export_model": True})
    for _ in range(2):  # a finished run may be started again
        DPOPipeline(asked).run()
        assert load_equal(run / "model", exported)
        assert not [path for path in run.iterdir() if path.name.startswith(".model")]


def test_adapters_on_layers_with_state_are_trained_and_merged(tiny_dir, tmp_path, ids):
    config = copy.deepcopy(STATEFUL["qwen3_5_text"])
    config.vocab_size, config.max_position_embeddings = AutoConfig.from_pretrained(tiny_dir).vocab_size, 512
    base = shutil.copytree(tiny_dir, tmp_path / "base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    trained = train(base, tmp_path, {"lora_rank": 4, "lora_target": ["in_proj_qkv", "q_proj"]})
    assert find_layout(trained[0])[1].name == "shared"
    export_checkpoint(trained[1], tmp_path / "model")
    before, after = (load_file(directory / "model.safetensors") for directory in (base, tmp_path / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = {name for name in before if name.endswith(("in_proj_qkv.weight", "q_proj.weight"))}
    assert before.keys() == after.keys()
    assert changed == adapted
    assert any("linear_attn" in name for name in adapted)
    check_logits(trained, tmp_path / "model", base, ids)


@pytest.mark.parametrize("layout", ["hub", "stacked"])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_are_written_under_the_names_that_they_were_read_from(family, layout, tiny_dir, tmp_path):
    config = copy.deepcopy({**FAMILIES, **STATEFUL}[family])
    config.vocab_size, config.max_position_embeddings = AutoConfig.from_pretrained(tiny_dir).vocab_size, 512
    base = shutil.copytree(tiny_dir, tmp_path / "base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base, save_original_format=layout == "hub")
    _, checkpoint = train(base, tmp_path, {"freeze_module_prefix": "model."})
    export_checkpoint(checkpoint, tmp_path / "model")
    before, after = (load_file(directory / "model.safetensors") for directory in (base, tmp_path / "model"))
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"lm_head.weight"}
