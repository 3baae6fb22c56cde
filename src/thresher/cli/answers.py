"""`thresher answers`: answers of a run's policy and its reference to the questions of AlpacaEval or Arena-Hard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thresher.cli.terminal import print_lines, progress_lines, quiet_libraries
from thresher.errors import UserError


def answers(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="output_dir of a run (newest checkpoint), a checkpoint or a model."),
    ],
    questions: Annotated[
        Path, typer.Argument(metavar="FILE", help="AlpacaEval's alpaca_eval.json or Arena-Hard's question.jsonl.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory of the answer files.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the policy in the files; default: that of the directory.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer only the first questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 2048,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most likely token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampled answers.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers that are generated together.")] = 16,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow Python code from the model directory.")
    ] = False,
) -> None:
    """Answer the questions of AlpacaEval or Arena-Hard with the policy and its reference, one file each."""
    from thresher.evaluation.answers import answer, read_questions, write_answers
    from thresher.evaluation.models import find_models
    from thresher.sampling.generation import GenerationSettings

    quiet_libraries()
    found = read_questions(questions, limit)
    name = name or Path(source).resolve().name
    if not name or name.startswith(".") or Path(name).name != name:
        raise UserError(f"--name {name} cannot name a file; use letters, digits, dots and dashes")
    models, _ = find_models(source, trust_remote_code=trust_remote_code)
    names = {each.name: f"{name}-reference" if each.name == "reference" else name for each in models}
    for each in names.values():
        if (path := found.file_of(output, each)).exists():
            raise UserError(f"{path} exists; remove it, or name a different --output directory")
    settings = GenerationSettings(max_new_tokens, temperature, seed)
    for model in models:
        texts = answer(model, found.prompts, settings, batch_size, progress_lines())
        print_lines(str(write_answers(found, output, names[model.name], texts)))
