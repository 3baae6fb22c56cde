"""The check of a GGUF file passes what a right converter writes, and names the fault of a wrong one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.gguf_files import write_gguf
from tests.support.paths import shared_path
from tests.support.small_runs import save_small_model, save_small_tokenizer
from tests.support.tiny_llama import VOCAB
from thresher.builders.gguf import TOLERANCES, compare, example_ids
from thresher.errors import UserError
from thresher.models.loading.load import load_model, load_tokenizer

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCAB))]
SPECIAL = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2}
EXAMPLES = [torch.tensor(ids) for ids in ([1, 5, 6, 7, 8, 9, 10, 11], list(range(4, 40)))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"), 0)


def difference(file: Path, model: Path) -> float:
    return compare(file, load_model(str(model)), load_tokenizer(str(model)), EXAMPLES)


def fault(file: Path, model: Path) -> str:
    with pytest.raises(UserError) as error:
        difference(file, model)
    return str(error.value)


def test_a_right_file_has_the_log_probabilities_of_the_model(model, tmp_path, caplog):
    caplog.set_level("INFO", "thresher")
    file = write_gguf(tmp_path / "m.gguf", model, tokens=WORDS, special=SPECIAL)
    assert difference(file, model) < 1e-6
    assert re.search(r"of 2 examples differ by \S+ per token, which may be 0.0001 for F32", caplog.text)


def test_a_file_in_16_bits_differs_by_its_rounding_and_no_more(model, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", model, dtype=torch.float16)
    assert 1e-6 < difference(file, model) < TOLERANCES["F16"] / 2


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "heads without the permutation": (
        {"permutes": lambda name: False},
        r"differ by [\d.]+ per token, and 0.0001 is allowed for F32; the rows of "
        r"model.layers.0.self_attn.k_proj.weight and 3 more are permuted within heads; delete it and convert it again$",
    ),
    "the keys of one layer, in 16 bits": (
        {"permutes": lambda name: "1.self_attn.k_proj" not in name, "dtype": torch.float16},
        r"the rows of model.layers.1.self_attn.k_proj.weight are permuted within heads;",
    ),
    "another base of RoPE": ({"rope_theta": 500000.0}, r"although its matrices agree, so its settings differ, such as"),
    "a matrix of another model": (
        {"change": lambda name, tensor: tensor.flip(1) if name == "model.layers.0.mlp.down_proj.weight" else tensor},
        r"the values of model.layers.0.mlp.down_proj.weight differ;",
    ),
    "not a number": (
        {"change": lambda name, tensor: tensor * float("nan") if name == "model.norm.weight" else tensor},
        r"log-probabilities differ by nan per token",
    ),
    "a shifted vocabulary": (
        {"tokens": [*WORDS[:10], *WORDS[11:], "w64"]},
        r"is not the exported model: 54 of 60 tokens of its vocabulary differ, such as 'w10' \(10\);",
    ),
    "another end of sequence": ({"special": SPECIAL | {"ggml.eos_token_id": 1}}, r"its EOS token is 1 instead of 2;"),
    "a chat template": ({"special": {"chat_template": "{{ x }}"}}, r"its chat template is not the tokenizer's;"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_conversion_is_named(name, model, tmp_path):
    settings, message = FAULTS[name]
    assert re.search(message, fault(write_gguf(tmp_path / "m.gguf", model, **settings), model))


def test_the_scaling_of_rope_is_compared_though_transformers_does_not_read_it(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64, rope_parameters=rope)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    save_small_tokenizer(tmp_path)
    # with the formula of llama.cpp's converter: wavelengths of 6.3, 63, 628 and 6283 tokens
    middle = (16 / (2 * torch.pi) - 1) / 3
    right = [1 / ((1 - middle) / 8 + middle), 8.0, 8.0, 8.0]
    assert difference(write_gguf(tmp_path / "right.gguf", tmp_path, rope_factors=right), tmp_path) < 1e-6
    absent = fault(write_gguf(tmp_path / "absent.gguf", tmp_path), tmp_path)
    assert "its scaling of RoPE (rope_freqs.weight) is absent" in absent
    wrong = fault(write_gguf(tmp_path / "wrong.gguf", tmp_path, rope_factors=[1.0, 1.0, 8.0, 8.0]), tmp_path)
    assert "its scaling of RoPE (rope_freqs.weight) differs" in wrong


@pytest.mark.real
@pytest.mark.hand
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_a_file_of_llama_cpp_is_the_model(outtype, tmp_path):
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("needs LLAMA_CPP, a checkout of llama.cpp")
    path = shared_path("models", "stories260K_hf")
    script, file = Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py", tmp_path / "m.gguf"
    subprocess.run([sys.executable, script, path, "--outfile", file, "--outtype", outtype], check=True)
    tokenizer = load_tokenizer(str(path))
    mean = compare(file, load_model(str(path)), tokenizer, example_ids(tmp_path / "no" / "run", tokenizer))
    print(f"{outtype}: {mean:.2e}")
    assert mean <= TOLERANCES[outtype.upper()] / 3
