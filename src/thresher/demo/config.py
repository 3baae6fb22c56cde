"""The config of the demo, as a file that the user can read, change and run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

_TEXT = """\
# Written by `thresher demo`. Change it and run it again:
#   thresher train {config} output_dir={other_run}
pretrain: {model}
output_dir: {run}
cache_dir: {cache}
sequence_length: {sequence_length}
beta: {beta}
{keeps_facts}{length}
eval_on_start: true
eval_steps: {eval_steps}
save_steps: {save_steps}
health: warn                # report what goes wrong in a run; `stop` ends it
actor_train:
  model_args: {{dtype: {dtype}}}
  data_args: {{file_name: {train}}}
  training_args:
    learning_rate: {learning_rate}
    per_device_train_batch_size: {pairs_per_step}     # pairs per step
validation:
  {validation}
"""


def write_config(
    directory: Path, *, model: str, data: Sequence[str], validation: Path | None, is_pretrained: bool
) -> Path:
    """Write dpo_config.yaml into the directory of the demo.

    validation: the file of the validation pairs; without one, a tenth of the pairs is held out. is_pretrained: the
    model is a real one, with more weights and less room for a high learning rate.
    """
    path = directory / "dpo_config.yaml"
    held_out = "split: 0.1" if validation is None else f"data_args: {{file_name: {_quoted(validation)}}}"
    text = _TEXT.format(
        config=path,
        other_run=directory / "run2",
        model=_quoted(model),
        run=_quoted(directory / "run"),
        cache=_quoted(directory / "cache"),
        sequence_length=512 if is_pretrained or validation is None else 128,
        length="max_steps: 40" if is_pretrained or validation is None else "num_train_epochs: 2",
        beta=0.1 if is_pretrained else 0.5,
        # a model this small unlearns its facts with DPO alone
        keeps_facts=""
        if is_pretrained
        else "rpo_alpha: 1.0              # also raise the likelihood of chosen answers\n",
        eval_steps=10,
        save_steps=20,
        dtype="bf16" if is_pretrained else "fp32",
        train=_quoted([str(each) for each in data]),
        learning_rate="1.0e-6" if is_pretrained else "2.0e-4",
        pairs_per_step=8 if is_pretrained else 16,
        validation=held_out,
    )
    path.write_text(text, encoding="utf-8")
    return path


def _quoted(value: object) -> str:
    """Write a path or a list of names as YAML on one line."""
    plain = value if isinstance(value, list) else str(value)
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
