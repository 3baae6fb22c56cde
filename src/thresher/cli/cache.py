"""`thresher cache`: lists, verifies and prunes the caches of reference log-probs and of prepared stores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich import filesize

from thresher.cli.terminal import make_table, print_lines, result_console
from thresher.errors import UserError

if TYPE_CHECKING:
    from thresher.data.store.cache import CachedStore
    from thresher.reference.cache import CachedReference

cache_app = typer.Typer(
    help="List, verify or prune the caches of reference log-probs and prepared pairs.", no_args_is_help=True
)
CacheDir = Annotated[
    str | None, typer.Option("--cache-dir", metavar="DIR", help="Default: $THRESHER_CACHE_DIR, else the user's cache.")
]
_SECONDS_PER_DAY = 24 * 3600.0


@cache_app.command("ls")
def list_cache(cache_dir: CacheDir = None) -> None:
    """List the reference models and the prepared stores in the cache, the most recently used first."""
    from thresher.data.store.cache import StoreCache, list_stores
    from thresher.reference.cache import cache_root, list_references

    root, stores_root = cache_root(cache_dir), StoreCache(cache_dir).root
    references, stores = list_references(root), list_stores(stores_root)
    if references:
        rows: list[tuple[str, ...]] = []
        for each in references:
            numbers = f"{each.num_pairs:,}", f"{each.num_shards:,}", filesize.decimal(each.num_bytes)
            rows.append((each.identity[:12], each.model, each.dtype, *numbers, _age(each)))
        texts = ["fingerprint", "model", "dtype"]
        _print_table(f"Reference cache in {root}", texts, ["pairs", "shards", "size"], rows)
    else:
        print_lines(f"{root} is empty; `thresher precompute-reference` and runs with reference.mode=precompute fill it")
    if stores:
        rows = []
        for store in stores:
            size = filesize.decimal(store.num_bytes)
            rows.append((store.identity[:12], _name_sources(store), f"{store.num_pairs:,}", size, _age(store)))
        _print_table(f"Prepared stores in {stores_root}", ["fingerprint", "files"], ["pairs", "size"], rows)
    else:
        print_lines(f"{stores_root} is empty; runs that prepare pairs fill it")


@cache_app.command()
def verify(cache_dir: CacheDir = None) -> None:
    """Verify the checksums of all shards and stores; exit with code 1 if any are damaged."""
    from thresher.data.store.cache import StoreCache, verify_stores
    from thresher.reference.cache import cache_root, verify_cache

    root, stores_root = cache_root(cache_dir), StoreCache(cache_dir).root
    num_valid, num_damaged, num_pairs = 0, 0, 0
    for shard, problem in verify_cache(root):
        if problem is None:
            num_valid += 1
            num_pairs += shard.num_pairs
        else:
            num_damaged += 1
            print_lines(f"damaged: {shard.path} {problem}")
    problems = [problem for _, problem in verify_stores(stores_root)]
    damaged_stores = [problem for problem in problems if problem is not None]
    for problem in damaged_stores:
        print_lines(f"damaged: {problem}")
    print_lines(f"{root}: {num_valid:,} valid shards with {num_pairs:,} pairs, {num_damaged:,} damaged")
    num_valid_stores = len(problems) - len(damaged_stores)
    print_lines(f"{stores_root}: {num_valid_stores:,} valid stores, {len(damaged_stores):,} damaged")
    if num_damaged or damaged_stores:
        print_lines(
            "a run that needs them sets damaged shards and stores aside and computes them again; deleting them is safe"
        )
        raise typer.Exit(1)


@cache_app.command()
def prune(
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", help="Only entries not used for this many days.")
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option("--identity", metavar="PREFIX", help="Only entries whose fingerprint starts with this."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without this, only list what would be removed.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove references, stores and leftovers of killed runs from the cache; a dry run without --yes."""
    from thresher.checkpoint.save import delete
    from thresher.data.store.cache import StoreCache, list_stores
    from thresher.reference.cache import CachedReference, cache_root, list_references, stale_files

    root, stores_root = cache_root(cache_dir), StoreCache(cache_dir).root
    entries: list[CachedReference | CachedStore] = [*list_references(root), *list_stores(stores_root)]
    if identity is not None:
        entries = [each for each in entries if each.identity.startswith(identity)]
        if not entries:
            raise UserError(
                f"nothing in {root} or {stores_root} has a fingerprint that starts with {identity}; see "
                "`thresher cache ls`"
            )
    if older_than is not None:
        entries = [each for each in entries if each.last_used < time.time() - older_than * _SECONDS_PER_DAY]
    for each in entries:
        what = each.model if isinstance(each, CachedReference) else _name_sources(each)
        size = filesize.decimal(each.num_bytes)
        print_lines(f"{each.identity[:12]}: {each.num_pairs:,} pairs of {what}, {size}, last used {_age(each)}")
    paths = [each.directory for each in entries]
    # files in a directory that is removed anyway are not listed again
    paths += [path for path in stale_files(root, stores_root) if path.parent not in paths]
    for path in paths[len(entries) :]:
        print_lines(f"leftover: {path}")
    if not paths:
        print_lines(f"nothing to remove in {root}")
    elif yes:
        for path in paths:
            if path.is_dir():  # never the target of a symlink: the link itself is renamed, then removed
                delete(path)
            else:
                path.unlink(missing_ok=True)
        print_lines("removed")
    else:
        print_lines("nothing was removed; pass --yes to remove these")


def _print_table(title: str, texts: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns of text, columns of numbers, and the time of last use."""
    table = make_table(title, texts, (*numbers, "last used"), rows)
    for column in (table.columns[0], *table.columns[len(texts) :]):
        column.no_wrap = True
    result_console().print(table)


def _name_sources(store: CachedStore) -> str:
    more = len(store.sources) - 1
    return "".join(store.sources[:1]) + (f" and {more} more" if more > 0 else "")


def _age(entry: CachedReference | CachedStore) -> str:
    seconds = max(0.0, time.time() - entry.last_used)
    for unit, length in (("day", _SECONDS_PER_DAY), ("hour", 3600.0), ("minute", 60.0)):
        if seconds >= length:
            count = round(seconds / length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
