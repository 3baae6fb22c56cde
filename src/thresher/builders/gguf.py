"""GGUF files of an export: their conversion by llama.cpp, and the check that a file is the model that was trained.

The file is read back by transformers, which undoes what a converter has to do, such as the order of the rows of rotated
heads. llama.cpp itself is not run: its own tokenizer and kernels are not checked.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from thresher.builders.export import has_reward_head, load_checkpoint, trained_model
from thresher.data.prepare.prepare import tokenizer_digest
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError
from thresher.models.loading.load import DTYPES, load_model, load_model_config, translate_load_errors
from thresher.models.pipeline_chunk import decoder_of
from thresher.optional import require

logger = logging.getLogger(__name__)

LLAMA_CPP = "LLAMA_CPP"
_SCRIPT = "convert_hf_to_gguf.py"
_OUTTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# Largest mean of |difference| of log-probabilities per token, in nats, by the least precise type of a file's matrices.
# Measured on two models; see docs/train/publish.md.
TOLERANCES = {"F32": 1e-4, "F16": 0.01, "BF16": 0.05, "Q8_0": 0.15}
_NUM_EXAMPLES, _LONGEST = 8, 512
_TEXTS = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside.",
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n",
    "Q: What is 37 * 3?\nA: 37 * 3 = 111.",
    "The quick brown fox jumps over the lazy dog.",
    "To be, or not to be, that is the question.",
    "Dear Sir or Madam,\n\nThank you for your letter of 3 May.",
    "Zażółć gęślą jaźń, naïve café, 你好.",
)


def find_converter(source: Path, checkpoint: Path, output: Path | None, file: Path, dtype: str | None) -> str | None:
    """Return the checkout of llama.cpp that is to convert a file, or raise with the commands to run instead.

    None if the file exists, so that it is only to be checked.
    """
    if file.suffix != ".gguf":
        raise UserError(f"the check of {file} needs a name that ends in .gguf")
    require(f"the check of {file}", "gguf", extra="gguf")
    if has_reward_head(checkpoint):
        raise UserError("llama.cpp has no reward models of transformers; leave --gguf out")
    path = os.environ.get(LLAMA_CPP)
    if file.exists():
        return None
    if path and (Path(path) / _SCRIPT).is_file():
        return path
    problem = f"{path} has no {_SCRIPT}" if path else "it is not set"
    directory = output or Path("DIR")
    outtype = _OUTTYPES[DTYPES[dtype or trained_model(checkpoint)[1].dtype]]
    raise UserError(
        f"{file} does not exist, and {LLAMA_CPP} names no checkout of llama.cpp to convert it ({problem}); set it, or "
        f"run\n  thresher export {source} --output {directory}\n  python llama.cpp/{_SCRIPT} {directory} "
        f"--outfile {file} --outtype {outtype}\n  thresher export {source} --gguf {file}"
    )


def convert(model: Path, file: Path, llama_cpp: str) -> None:
    """Run llama.cpp's converter on a model directory, in the directory's precision."""
    dtype: Any = load_model_config(str(model)).dtype
    script = str(Path(llama_cpp) / _SCRIPT)
    command = [sys.executable, script, str(model), "--outfile", str(file), "--outtype", _OUTTYPES[dtype]]
    logger.info("converting: %s", shlex.join(command))
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not file.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        hint = "run `pip install sentencepiece`" if "sentencepiece" in last else "convert it by hand"
        raise UserError(f"llama.cpp's converter failed with exit code {done.returncode}: {last}; {hint}")


def check_gguf(
    file: Path,
    checkpoint: Path,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    merge_into: str | None = None,
) -> float:
    """Compare a file with the export of a checkpoint; return the mean difference of log-probabilities per token.

    One model is in memory at a time, in fp32.
    """
    model, tokenizer, _ = load_checkpoint(
        checkpoint, dtype=dtype, trust_remote_code=trust_remote_code, merge_into=merge_into
    )
    return compare(file, model, tokenizer, example_ids(checkpoint, tokenizer))


def compare(
    file: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Tensor]
) -> float:
    """Compare a file with the model that it was converted from, whose weights are released."""
    from gguf import GGUFReader

    with translate_load_errors("GGUF file", str(file)):
        fields = GGUFReader(file)
    problems = list(_compare_tokenizers(fields, tokenizer))
    torch.nn.Module.to(model, torch.float32)
    settings = model.config.get_text_config()
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    logps, projections = _logps(model, examples), _projections(model)
    rope = copy.deepcopy(decoder_of(model).rotary_emb) if _scales_rope(model) else None
    torch.nn.Module.to(model, "meta")
    loaded = load_model(str(file), dtype=torch.float32)
    if rope is not None:
        problems += _compare_rope(fields, model, rope)
        decoder_of(loaded).rotary_emb = rope
    differences = [(a - b).abs() for a, b in zip(logps, _logps(loaded, examples), strict=True)]
    mean = float(torch.cat(differences).mean())
    kinds = {tensor.tensor_type.name for tensor in fields.tensors if len(tensor.shape) > 1}
    kind = max(kinds, key=lambda each: TOLERANCES.get(each, math.inf))
    limit = TOLERANCES.get(kind, math.inf)
    problems += _compare_matrices(projections, _projections(loaded), head_dim)
    if not mean <= limit:  # so NaN is a difference
        cause = (
            ""
            if problems
            else ", although its matrices agree, so its settings differ, such as RoPE or a norm's epsilon"
        )
        problems.insert(
            0, f"log-probabilities differ by {mean:.2g} per token, and {limit:g} is allowed for {kind}{cause}"
        )
    if problems:
        raise UserError(f"{file} is not the exported model: {'; '.join(problems)}; delete it and convert it again")
    allowed = "has no known limit" if math.isinf(limit) else f"may be {limit:g}"
    logger.info(
        "checked %s: log-probabilities of %d examples differ by %.2g per token, which %s for %s",
        *(file, len(examples), mean, allowed, kind),
    )
    return mean


def example_ids(checkpoint: Path, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """Token ids of eight examples: the first pairs of the run, or texts if its store is not there."""
    for path in sorted((checkpoint.resolve().parent.parent / "data").glob("train-*")):
        with suppress(UserError):
            store = ExampleStore.open(path)
            if store.tokenizer_digest == tokenizer_digest(tokenizer):
                pairs = [store[row] for row in range(min(_NUM_EXAMPLES, len(store)))]
                return [torch.from_numpy(np.concatenate((each.prompt_ids, each.chosen.ids))) for each in pairs]
    return [torch.tensor(tokenizer.encode(text)) for text in _TEXTS]


@torch.no_grad()
def _logps(model: PreTrainedModel, examples: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for ids in (each[None, :_LONGEST].long() for each in examples):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        found.append(-torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    return found


@torch.no_grad()
def _projections(model: PreTrainedModel) -> dict[str, Tensor]:
    """Each matrix times the same random vector: one number per row, to find the matrices that differ."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            found[name] = weight @ torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    return found


def _compare_matrices(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], head_dim: int) -> Iterator[str]:
    """Name the matrices that differ by more than rounding to four bits."""
    wrong: list[str] = []
    permuted: list[str] = []
    for name in sorted(expected.keys() & found.keys()):
        a, b = expected[name], found[name]
        if a.shape == b.shape and _differs(a, b):
            (permuted if _is_permuted(a, b, head_dim) else wrong).append(name)
    for what, names in (("the rows of {} are permuted within heads", permuted), ("the values of {} differ", wrong)):
        if names:
            yield what.format(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""))


def _is_permuted(a: Tensor, b: Tensor, head_dim: int) -> bool:
    """Whether the halves of each head that RoPE rotates are interleaved on one side only."""
    if len(a) % head_dim:
        return False
    orders = (a.reshape(-1, *halves).mT.flatten() for halves in ((2, head_dim // 2), (head_dim // 2, 2)))
    return not all(_differs(order, b) for order in orders)


def _differs(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() > 0.5 * a.norm())


def _compare_tokenizers(fields: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Name what differs in vocabulary, special tokens and chat template; llama.cpp reads them from the file."""
    stored = {name.removeprefix("tokenizer."): field for name, field in fields.fields.items() if "tokenizer." in name}
    value = {name: stored[name].contents() for name in stored if name.startswith(("ggml.", "chat_template"))}
    if "ggml.tokens" in value:
        tokens, added = value["ggml.tokens"], tokenizer.added_tokens_decoder
        ids = [number for number in range(len(tokenizer)) if number not in added]
        own = tokenizer.convert_ids_to_tokens(ids)
        other = [(number, name) for number, name in zip(ids, own, strict=True) if tokens[number : number + 1] != [name]]
        if other:
            yield f"{len(other)} of {len(ids)} tokens of its vocabulary differ, such as {other[0][1]!r} ({other[0][0]})"
    for name in ("bos", "eos"):
        own_id, its_id = getattr(tokenizer, f"{name}_token_id"), value.get(f"ggml.{name}_token_id")
        if own_id is not None and its_id is not None and own_id != its_id:
            yield f"its {name.upper()} token is {its_id} instead of {own_id}"
    if (value.get("chat_template") or "") != (tokenizer.chat_template or ""):
        yield "its chat template is not the tokenizer's"


def _compare_rope(fields: Any, model: PreTrainedModel, rope: torch.nn.Module) -> Iterator[str]:
    """Compare the scaling of RoPE, which transformers does not read from GGUF files; warn if that is not possible."""
    settings: Any = model.config.get_text_config()
    parameters = settings.rope_parameters
    if parameters.get("rope_type") != "llama3":
        logger.warning("the scaling of RoPE in GGUF files is compared for Llama 3 only, so here it is not")
        return
    frequencies: Any = rope.inv_freq
    unscaled = parameters["rope_theta"] ** -torch.linspace(0, 1, len(frequencies) + 1)[:-1]
    stored = [torch.tensor(each.data) for each in fields.tensors if each.name == "rope_freqs.weight"]
    if not stored or not torch.allclose(stored[0].float(), unscaled / frequencies.cpu(), rtol=1e-4):
        yield f"its scaling of RoPE (rope_freqs.weight) {'differs' if stored else 'is absent'}"


def _scales_rope(model: PreTrainedModel) -> bool:
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (parameters, *parameters.values()) if isinstance(each, dict)}
    return bool(kinds - {None, "default"})
