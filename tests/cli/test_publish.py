"""`thresher export` writes a model card, uploads to the Hub, and converts to GGUF, as commands on a small run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml
from huggingface_hub import ModelCard

from tests.support.compared_runs import merge
from tests.support.gguf_files import write_gguf
from tests.support.hub_server import card_errors, hub_server
from tests.support.small_run_fixtures import base
from thresher.builders.export import export_checkpoint
from thresher.builders.model_card import model_card, public_config
from thresher.checkpoint.json_io import save_json
from thresher.checkpoint.manifest import read_manifest, record_files, write_manifest
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline

__all__ = ["base"]
TOKEN = "hf_thisIsNotARealToken"


@pytest.fixture(scope="module")
def run(base, tmp_path_factory) -> Path:
    """A run of two steps, of a model whose card states its licence."""
    root = tmp_path_factory.mktemp("published")
    model = shutil.copytree(base["pretrain"], root / "my-base")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    changes = {"pretrain": str(model), "output_dir": str(root / "run"), "max_steps": 2, "eval_on_start": True}
    DPOPipeline(parse_config(merge(base, changes))).run()
    return root / "run"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        (tmp_path / "token").write_text(TOKEN)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield server


@pytest.fixture
def other_template(run):
    """Add a second chat template to the base, in a directory that transformers reads and writes."""
    directory = run.parent / "my-base" / "additional_chat_templates"
    directory.mkdir()
    (directory / "tool_use.jinja").write_text("{{ messages }}")
    yield
    shutil.rmtree(directory)


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "step-00000002"


def test_the_card_states_base_data_loss_metrics_config_and_versions(run, command_line, tmp_path):
    assert command_line("export", run, "--output", "my-model").code == 0
    text = (tmp_path / "my-model" / "README.md").read_text()
    card = ModelCard(text)
    assert not card_errors(text)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["thresher", "dpo"],
    }
    assert "A fine-tune of `my-base`" in text
    assert "| data | train.jsonl: rows read 21, pairs kept 21 |" in text
    assert "| loss | sigmoid(beta=0.1) |" in text
    assert "| steps | 2 of 2 steps of 6 pairs" in text
    records = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    before, after = (each["eval/loss"] for each in records if "eval/loss" in each)
    assert f"| eval/loss | {before:.4g} | {after:.4g} |" in text
    config = yaml.safe_load(text.partition("```yaml\n")[2].partition("\n```\n")[0])
    assert config["actor_train"]["training_args"]["global_batch_size"] == 6
    assert config["pretrain"] == "my-base"
    assert config["actor_train"]["data_args"]["file_name"] == ["train.jsonl"]
    assert "output_dir" not in config
    assert "thresher 0." in text.partition("## Versions")[2]
    assert 'from_pretrained("my-model")' in text
    for place in (str(run.parent), str(run.parent.name), str(Path.home()), "/tmp", "my-reference"):
        assert place not in text


def test_an_own_or_edited_card_is_kept_with_a_warning_and_a_written_one_is_replaced(run, tmp_path, caplog):
    export_checkpoint(checkpoint_of(run), tmp_path / "m", name="first")
    export_checkpoint(checkpoint_of(run), tmp_path / "m", name="second", overwrite=True)
    card = tmp_path / "m" / "README.md"
    assert "# second" in card.read_text()
    assert "was kept" not in caplog.text
    card.write_text(card.read_text().replace("# second", "# mine"))
    names = export_checkpoint(checkpoint_of(run), tmp_path / "m", name="third", overwrite=True)
    assert "# mine" in card.read_text()
    assert (
        "README.md was kept, because it is not as thresher wrote it; delete it to get a new model card" in caplog.text
    )
    assert "README.md" in names


def test_a_card_names_the_files_of_a_run_without_their_directories(base, tmp_path):
    root = tmp_path / "in my home"
    models = [shutil.copytree(base["pretrain"], root / name) for name in ("model", "other")]
    (root / "loss.py").write_text("def mine(pairs, beta=0.1):\n    return -beta * pairs.log_ratios.margin\n")
    loss = f"{root}/loss.py:mine"
    changes = {
        "pretrain": str(models[0]),
        "output_dir": str(root / "run"),
        "max_steps": 1,
        "pref_loss": {loss: 1.0},
        "reference": {"model_args": {"model_name_or_path": str(models[1])}},
    }
    DPOPipeline(parse_config(merge(base, changes))).run()
    text = model_card(root / "run" / "checkpoints" / "step-00000001", str(models[0]), "mine")
    assert "in my home" not in text
    assert "| loss | loss.py:mine(beta=0.1) |" in text
    assert "| reference | precompute, other |" in text
    config = yaml.safe_load(text.partition("```yaml\n")[2].partition("\n```\n")[0])
    assert config["pref_loss"] == {"loss.py:mine": 1.0}
    assert list(config["pref_loss_digests"]) == ["loss.py:mine"]


def test_names_of_a_malicious_checkpoint_stay_text(run, tmp_path):
    """They end neither the header, a line, a table's cell, a link nor a code block, and no file is shown."""
    evil = "x\n---\nlicense: mit\n---\n| [a](b) <script>alert(1)</script> ``` </details> `"
    copy = shutil.copytree(run, tmp_path / "run")
    checkpoint = checkpoint_of(copy)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"pref_loss": {evil: 1.0}, "pretrain": evil, "seed": evil, evil: evil, "hf_token": TOKEN}
    config["actor_train"]["data_args"] |= {"system_prompt": "````\n</details>\n" + evil, "file_name": ["hf://a/b\n- c"]}
    save_json(checkpoint / "config.json", config)
    manifest = read_manifest(checkpoint)
    values = {"step": 2, "files": record_files(checkpoint, list(manifest.files)), "metrics": {f"eval/{evil}": 1.0}}
    write_manifest(checkpoint, type(manifest)(**values))
    described = json.loads((copy / "logs" / "run.json").read_text())
    described["facts"] |= {"loss": evil, "steps": evil, "parameters": evil}
    described["environment"] = {evil: evil}
    described["data"]["train"] = {"kind": evil, "pairs": evil, "report": {"files": 3}}
    (copy / "logs" / "run.json").write_text(json.dumps(described))
    text = model_card(checkpoint, evil, evil)
    assert set(ModelCard(text).data.to_dict()) == {"library_name", "pipeline_tag", "tags", "datasets"}
    assert ModelCard(text).data.datasets == ["a/b"]
    assert TOKEN not in text
    before, fence, rest = text.partition("`````yaml\n")
    config_block, end, after = rest.partition("\n`````\n")
    assert fence
    assert end
    assert yaml.safe_load(config_block)["seed"] == evil
    python_block = before.partition("```python\n")[2].partition("\n```\n")[0]
    for outside in (before.replace(python_block, ""), after):
        assert "<script" not in outside.replace("\\<", "")
        assert "](b)" not in outside.replace("\\]", "")
    assert after.count("</details>") == 1
    tables = [line for line in (before + after).splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {3, 4}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"pretrain": "org/name@main"}, {"pretrain": "org/name@main"}),
        ({"pretrain": "/home/me/models/base"}, {"pretrain": "base"}),
        ({"merge_adapters": ["~/a/one", "org/two"]}, {"merge_adapters": ["one", "org/two"]}),
        ({"file_name": ["data/a.jsonl", "hf://org/pairs:train"]}, {"file_name": ["a.jsonl", "hf://org/pairs:train"]}),
        ({"file_name": ["s3://me:pw@bucket/a.parquet?X-Amz-Signature=x"]}, {"file_name": ["a.parquet"]}),
        ({"pref_loss": {"/home/me/mine.py:loss": 2.0}}, {"pref_loss": {"mine.py:loss": 2.0}}),
        ({"pref_loss": ["sigmoid", "../mine.py:loss"]}, {"pref_loss": ["sigmoid", "mine.py:loss"]}),
        ({"template": "/srv/templates/t.jinja"}, {"template": "t.jinja"}),
        ({"system_prompt": "/no_think"}, {"system_prompt": "/no_think"}),
        ({"strategy_config": {"file": "/home/me/ds.json"}}, {"strategy_config": {"file": "ds.json"}}),
        ({"judge_model": "/models/llama 70b/x"}, {"judge_model": "x"}),
        ({"strategy_config": {"file": "/home/me/a b/c.json"}}, {"strategy_config": {"file": "c.json"}}),
        ({"strategy_config": {"nvme": "/local_nvme"}}, {"strategy_config": {"nvme": "local_nvme"}}),
        ({"strategy_config": {"file": "file:/home/me/c.json"}}, {"strategy_config": {"file": "c.json"}}),
        ({"template_arguments": {"system": "/no_think"}}, {"template_arguments": {"system": "/no_think"}}),
        ({"exclude": "x" * 5000 + "/y"}, {"exclude": "x" * 5000 + "/y"}),
        ({"output_dir": "x", "system_envs": {"A": "b"}, "tracker_kwargs": {"notes": "n"}, "beta": 0.1}, {"beta": 0.1}),
    ],
    ids=str,
)
def test_the_config_of_a_card_has_no_places(given, shown):
    assert yaml.safe_load(public_config(given)) == shown


@pytest.mark.usefixtures("other_template")
def test_push_uploads_what_was_exported_with_the_stored_token(run, hub, command_line, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "private.txt").write_text("mine")
    arguments = ("--output", "out", "--overwrite", "--push", "someone/tiny", "--private", "--revision", "trial")
    done = command_line("export", run, *arguments)
    assert done.code == 0
    assert f"uploaded to {hub.address}/someone/tiny/commit/" in done.err
    written = (path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert set(hub.repos["someone/tiny"]) == set(map(str, written)) - {"private.txt"}
    assert hub.repos["someone/tiny"]["additional_chat_templates/tool_use.jinja"] == b"{{ messages }}"
    assert b'from_pretrained("someone/tiny")' in hub.repos["someone/tiny"]["README.md"]
    assert hub.private == {"someone/tiny"}
    assert hub.branches == [("someone/tiny", "trial")]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.out + done.err

    # without --output nothing stays on this machine
    before = set(tmp_path.iterdir())
    assert command_line("export", run, "--push", "someone/tiny").code == 0
    assert set(tmp_path.iterdir()) == before
    assert hub.branches[1] == ("someone/tiny", "main")

    # a card that somebody has written is uploaded as it is, if the Hub takes it
    (tmp_path / "out" / "README.md").write_text("---\nlicense: Not A Licence\n---\n")
    done = command_line("export", run, "--output", "out", "--overwrite", "--push", "someone/tiny")
    assert done.code == 2
    assert "the Hugging Face Hub rejects the model card of someone/tiny" in done.err
    assert '"license" must be an identifier' in done.err


def test_a_refused_push_says_what_to_do_before_anything_is_exported(run, hub, command_line, tmp_path, monkeypatch):
    def refused(*arguments: str) -> str:
        done = command_line("export", run, "--output", "out", "--push", *arguments)
        assert done.code == 2
        assert not (tmp_path / "out").exists()
        assert TOKEN not in done.err
        return " ".join(done.err.split())

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "the shard size 'huge' is not a number with a unit" in refused("someone/tiny", "--max-shard-size", "huge")
    assert "has no adapter" in refused("someone/tiny", "--merge-into", "org/other")
    assert "is not an empty directory" in refused("someone/tiny", "-o", "full")
    assert not hub.repos
    hub.repos["someone/public"] = {}
    assert "someone/public exists and is public; make it private" in refused("someone/public", "--private")
    assert "is not a name on the Hugging Face Hub" in refused("no/such/name")
    hub.status = 401
    assert "log in with `hf auth login`, with a token that may write" in refused("someone/tiny")
    hub.status = 403
    assert "the token may not write to other/tiny" in refused("other/tiny")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "the upload to someone/tiny failed" in refused("someone/tiny")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "nothing can be uploaded to someone/tiny while HF_HUB_OFFLINE is set" in refused("someone/tiny")


def test_options_without_effect_are_rejected(run, command_line, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    for arguments, expected in (
        ((), "the export has no place to go; name a directory with --output DIR, or --push OWNER/NAME"),
        (("-o", "m", "--private"), "--private has no effect without --push OWNER/NAME"),
        (("-o", "m", "--revision", "x"), "--revision has no effect without --push OWNER/NAME"),
        (("-o", "m", "--adapter", "--gguf", "x.gguf"), "--gguf has no effect with --adapter"),
        (
            ("-o", "m", "--gguf", "x.gguf"),
            "names no checkout of llama.cpp to convert it (it is not set); set it, or run",
        ),
        (("-o", "m", "--gguf", "x.gguf"), "python llama.cpp/convert_hf_to_gguf.py m --outfile x.gguf --outtype f32"),
        (("-o", "m", "--gguf", "x.bin"), "the check of x.bin needs a name that ends in .gguf"),
        (("-o", "m", "--gguf", "x.gguf"), f"thresher export {run} --gguf x.gguf"),
    ):
        done = command_line("export", run, *arguments)
        assert done.code == 2
        assert expected in " ".join(done.err.split())


def test_gguf_is_converted_checked_and_pushed(run, hub, command_line, tmp_path, monkeypatch):
    """A program in the place of llama.cpp's takes its arguments, and copies what a right converter writes."""
    export_checkpoint(checkpoint_of(run), tmp_path / "same")
    right = write_gguf(tmp_path / "right.gguf", tmp_path / "same")
    wrong = write_gguf(tmp_path / "wrong.gguf", tmp_path / "same", permutes=lambda name: False)
    program = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    program.parent.mkdir()
    program.write_text(
        "import os, shutil, sys\n"
        "model, option, file, kind, value = sys.argv[1:]\n"
        "assert (option, kind, value) == ('--outfile', '--outtype', 'f32') and os.path.isfile(model + '/config.json')\n"
        "sys.exit('no such architecture') if 'SOURCE' not in os.environ else shutil.copy(os.environ['SOURCE'], file)\n"
    )
    monkeypatch.setenv("LLAMA_CPP", str(program.parent))
    done = command_line("export", run, "--output", "failed", "--gguf", "failed.gguf")
    assert done.code == 2
    assert "llama.cpp's converter failed with exit code 1: no such architecture" in " ".join(done.err.split())

    monkeypatch.setenv("SOURCE", os.fspath(right))
    done = command_line("export", run, "--output", "out", "--gguf", "out/m.gguf", "--push", "someone/tiny")
    assert done.code == 0
    assert "log-probabilities of 8 examples differ by" in done.err
    assert hub.repos["someone/tiny"]["m.gguf"] == right.read_bytes()

    # alone, for a file that was converted elsewhere
    assert command_line("export", run, "--gguf", right).code == 0
    done = command_line("export", run, "--gguf", wrong)
    assert done.code == 2
    assert "and 3 more are permuted within heads; delete it and convert it again" in " ".join(done.err.split())
