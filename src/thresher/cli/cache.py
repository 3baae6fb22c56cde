"""`thresher cache`: what the reference cache holds, whether it is sound, and making room."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from thresher.reference.cache_admin import CachedReference

cache_app = typer.Typer(help="List, verify or prune the cache of reference logps.", no_args_is_help=True)
CacheDir = Annotated[
    str | None, typer.Option("--cache-dir", help="The cache; $THRESHER_CACHE_DIR or the user's cache when absent.")
]
SECONDS_A_DAY = 24 * 3600.0


@cache_app.command("ls")
def list_cache(cache_dir: CacheDir = None) -> None:
    """List the references that have logps in the cache, the last used first."""
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
        print_line(
            f"{root} holds nothing yet; runs with reference.mode=precompute and `thresher precompute-reference` fill it"
        )
        return
    table = Table(title=f"reference cache in {root}", title_justify="left")
    table.add_column("identity", no_wrap=True)
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
    """Read every byte of the cache; exit code 1 and the names of all shards that are damaged, if any are."""
    from thresher.cli.terminal import print_line
    from thresher.reference.cache_admin import cache_root, verify_cache

    root = cache_root(cache_dir)
    num_sound, num_damaged, num_pairs = 0, 0, 0
    for shard, fault in verify_cache(root):
        if fault is None:
            num_sound += 1
            num_pairs += shard.num_pairs
        else:
            num_damaged += 1
            print_line(f"damaged: {shard.path} {fault}")
    print_line(f"{root}: {num_sound:,} sound shards with {num_pairs:,} pairs, {num_damaged:,} damaged")
    if num_damaged:
        print_line("delete the damaged ones, or leave them: a run sets them aside and scores the pairs it needs again")
        raise typer.Exit(1)


@cache_app.command()
def prune(
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", help="Only what no run has used for so many days.")
    ] = None,
    identity: Annotated[
        str | None, typer.Option("--identity", metavar="PREFIX", help="Only the reference that `cache ls` names so.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; without this, only say what would go.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove references from the cache, and what killed runs left behind; without --yes, say what would go."""
    from rich import filesize

    from thresher.cli.terminal import print_line
    from thresher.errors import UserError
    from thresher.reference.cache_admin import cache_root, list_references, remove, stale_files

    root = cache_root(cache_dir)
    references = list_references(root)
    if identity is not None:
        references = [each for each in references if each.identity.startswith(identity)]
        if not references:
            raise UserError(f"nothing in {root} has an identity that begins with {identity}; see `thresher cache ls`")
    if older_than is not None:
        references = [each for each in references if each.last_used < time.time() - older_than * SECONDS_A_DAY]
    for each in references:
        size = filesize.decimal(each.num_bytes)
        print_line(f"{each.identity[:12]}: {each.num_pairs:,} pairs of {each.model}, {size}, last used {_age(each)}")
    paths = [each.directory for each in references]
    # what lies in a directory that goes as a whole need not be told again
    paths += [path for path in stale_files(root) if path.parent not in paths]
    for path in paths[len(references) :]:
        print_line(f"left behind: {path}")
    if not paths:
        print_line(f"nothing to remove in {root}")
    elif yes:
        remove(paths)
        print_line("removed")
    else:
        print_line("nothing was removed; pass --yes to remove all this")


def _age(reference: CachedReference) -> str:
    seconds = max(0.0, time.time() - reference.last_used)
    for unit, length in (("days", SECONDS_A_DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
