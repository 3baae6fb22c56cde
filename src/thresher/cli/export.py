"""`thresher export`: writes a Hugging Face model directory from a run or a checkpoint, uploads and converts it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from thresher.cli.terminal import quiet_libraries
from thresher.errors import UserError

logger = logging.getLogger(__name__)


def export(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="output_dir of a run (its newest checkpoint), or a checkpoint.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Directory to write; a temporary one with --push alone."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; default: the run's compute dtype, of adapters fp32.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest weight file, such as 5GB; a larger tensor has its own file.")
    ] = "50GB",
    best: Annotated[
        bool, typer.Option("--best", help="Export the best checkpoint of the run, not the newest.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files of a model that is in the directory.")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter/--merge", help="Export the LoRA adapter alone, or the model with it merged.")
    ] = False,
    merge_into: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="Merge the adapter into a different model than the run's, with a warning."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow Python code from the model directory.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the export to the Hugging Face Hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: upload to a private repository.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="With --push: the branch to upload to.")
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Check that a GGUF file has the log-probabilities of the model. If it does not exist, it is converted "
            "first, by the llama.cpp in LLAMA_CPP.",
        ),
    ] = None,
) -> None:
    """Export a checkpoint as a Hugging Face model directory, with LoRA adapters merged, or its adapter."""
    from thresher.builders.checkpoints import checkpoint_at
    from thresher.builders.export import MAX_SHARD_SIZE, check_export, export_adapter, export_checkpoint, trained_model
    from thresher.builders.gguf import check_gguf, convert, find_converter
    from thresher.builders.upload import open_repository, upload
    from thresher.models.loading.location import hub_name

    quiet_libraries()
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise UserError(f"--dtype {dtype} is unknown; use fp32, bf16 or fp16")
    for name, value, default in (
        ("merge-into", merge_into, None),
        ("max-shard-size", max_shard_size, MAX_SHARD_SIZE),
        ("gguf", gguf, None),
    ):
        if adapter and value != default:
            raise UserError(f"--{name} has no effect with --adapter; leave one of them out")
    for name, given in (("private", private), ("revision", revision)):
        if given and push is None:
            raise UserError(f"--{name} has no effect without --push OWNER/NAME; leave it out, or name a repository")
    checkpoint = checkpoint_at(source, is_best=best)
    if output is None and push is None and (gguf is None or not gguf.exists()):
        raise UserError("the export has no place to go; name a directory with --output DIR, or --push OWNER/NAME")
    llama_cpp = None if gguf is None else find_converter(source, checkpoint, output, gguf, dtype)
    if adapter and push is not None and hub_name(base := trained_model(checkpoint)[0]) is None:
        raise UserError(
            f"an adapter names its base, and the run's is a directory of this machine, {base}; push the merged model "
            "(leave --adapter out), or train from a name on the Hugging Face Hub"
        )
    if push is not None:  # before the export, which may take long
        check_export(
            checkpoint,
            output,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
            overwrite=overwrite,
            adapter=adapter,
            merge_into=merge_into,
        )
        push = open_repository(push, private=private or None, revision=revision)
    with ExitStack() as stack:
        if output is None and push is not None:
            output = Path(stack.enter_context(TemporaryDirectory())) / "model"
        files: list[str] = []
        if output is not None and adapter:
            files = export_adapter(
                checkpoint, output, dtype=dtype, trust_remote_code=trust_remote_code, overwrite=overwrite, name=push
            )
        elif output is not None:
            files = export_checkpoint(
                checkpoint,
                output,
                dtype=dtype,
                max_shard_size=max_shard_size,
                trust_remote_code=trust_remote_code,
                overwrite=overwrite,
                merge_into=merge_into,
                name=push,
            )
        if output is not None:
            logger.info("exported %s to %s", checkpoint, output)
        if gguf is not None:
            if llama_cpp is not None and output is not None:
                convert(output, gguf, llama_cpp)
            check_gguf(gguf, checkpoint, dtype=dtype, trust_remote_code=trust_remote_code, merge_into=merge_into)
        if push is not None and output is not None:
            if gguf is not None and gguf.resolve().parent == output.resolve():
                files.append(gguf.name)
            done = upload(output, push, files, message="Upload of thresher export", revision=revision)
            logger.info("uploaded to %s", done.commit_url)
