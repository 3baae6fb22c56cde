"""`thresher cache`: lists, verifies and prunes the reference cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from thresher.reference.cache_admin import CachedReference

cache_app = typer.Typer(help="List, verify or prune the cache of reference log-probs.", no_args_is_help=True)
CacheDir = Annotated[
    str | None, typer.Option("--cache-dir", metavar="DIR", help="Default: $THRESHER_CACHE_DIR, else the user's cache.")
]
_SECONDS_PER_DAY = 24 * 3600.0


@cache_app.command("ls")
def list_cache(cache_dir: CacheDir = None) -> None:
    """List the reference models in the cache, the most recently used first."""
    from rich import filesize
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from thresher.cli.terminal import print_line
    from thresher.redact import escape_control_chars
    from thresher.reference.cache_admin import cache_root, list_references

    root = cache_root(cache_dir)
    references = list_references(root)
    if not references:
        print_line(f"{root} is empty; `thresher precompute-reference` and runs with reference.mode=precompute fill it")
        return
    table = Table(title=f"Reference cache in {root}", title_justify="left")
    table.add_column("fingerprint", no_wrap=True)
    table.add_column("model", overflow="fold")
    table.add_column("dtype")
    for heading in ("pairs", "shards", "size", "last used"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in references:
        size = filesize.decimal(each.num_bytes)
        table.add_row(
            *(Text(escape_control_chars(text)) for text in (each.identity[:12], each.model, each.dtype)),
            f"{each.num_pairs:,}",
            f"{each.num_shards:,}",
            size,
            _age(each),
        )
    Console().print(table)


@cache_app.command()
def verify(cache_dir: CacheDir = None) -> None:
    """Verify the checksums of all shards; exit with code 1 if any are damaged."""
    from thresher.cli.terminal import print_line
    from thresher.reference.cache_admin import cache_root, verify_cache

    root = cache_root(cache_dir)
    num_valid, num_damaged, num_pairs = 0, 0, 0
    for shard, problem in verify_cache(root):
        if problem is None:
            num_valid += 1
            num_pairs += shard.num_pairs
        else:
            num_damaged += 1
            print_line(f"damaged: {shard.path} {problem}")
    print_line(f"{root}: {num_valid:,} valid shards with {num_pairs:,} pairs, {num_damaged:,} damaged")
    if num_damaged:
        print_line(
            "a run that needs their pairs sets damaged shards aside and scores the pairs again; deleting them is safe"
        )
        raise typer.Exit(1)


@cache_app.command()
def prune(
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", help="Only references not used for this many days.")
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option("--identity", metavar="PREFIX", help="Only references whose fingerprint starts with this."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without this, only list what would be removed.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove references and leftovers of killed runs from the cache; a dry run without --yes."""
    from rich import filesize

    from thresher.cli.terminal import print_line
    from thresher.errors import UserError
    from thresher.reference.cache_admin import cache_root, list_references, remove, stale_files

    root = cache_root(cache_dir)
    references = list_references(root)
    if identity is not None:
        references = [each for each in references if each.identity.startswith(identity)]
        if not references:
            raise UserError(
                f"no reference in {root} has a fingerprint that starts with {identity}; see `thresher cache ls`"
            )
    if older_than is not None:
        references = [each for each in references if each.last_used < time.time() - older_than * _SECONDS_PER_DAY]
    for each in references:
        size = filesize.decimal(each.num_bytes)
        print_line(f"{each.identity[:12]}: {each.num_pairs:,} pairs of {each.model}, {size}, last used {_age(each)}")
    paths = [each.directory for each in references]
    # files in a directory that is removed anyway are not listed again
    paths += [path for path in stale_files(root) if path.parent not in paths]
    for path in paths[len(references) :]:
        print_line(f"leftover: {path}")
    if not paths:
        print_line(f"nothing to remove in {root}")
    elif yes:
        remove(paths)
        print_line("removed")
    else:
        print_line("nothing was removed; pass --yes to remove these")


def _age(reference: CachedReference) -> str:
    seconds = max(0.0, time.time() - reference.last_used)
    for unit, length in (("days", _SECONDS_PER_DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
