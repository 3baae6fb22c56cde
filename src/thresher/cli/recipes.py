"""`thresher recipes`: lists, shows and copies the configs with published settings that thresher contains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from thresher.cli.terminal import print_lines, result_console
from thresher.errors import UserError, unusable_path
from thresher.recipes.catalog import Recipe, all_recipes, find_recipe

recipes_app = typer.Typer(help="List, show or copy recipes: configs with published settings.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Recipe, as `thresher recipes ls` names it.")]


@recipes_app.command("ls")
def list_recipes(
    word: Annotated[
        str | None, typer.Argument(metavar="WORD", help="Only recipes with this in name, title, model, data or loss.")
    ] = None,
) -> None:
    """List the recipes with their model, loss, GPUs, and expected memory and hours."""
    recipes = all_recipes()
    if word is not None:
        recipes = [each for each in recipes if word.lower() in _searched(each).lower()]
        if not recipes:
            raise UserError(
                f"no recipe has {word!r} in its name, title, model, data or loss; `thresher recipes ls` lists all"
            )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("model", overflow="ellipsis")  # the only column that may be cut
    table.add_column("loss", no_wrap=True)
    for heading in ("GPUs", "GB", "hours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in recipes:
        gpus = f"{each.num_gpus} {each.gpu}"
        table.add_row(each.name, each.model.rpartition("/")[2], each.losses, gpus, each.gigabytes, each.hours)
    result_console().print(table)
    print_lines(
        "\nGB per GPU and hours of training are estimates by `thresher plan`, with examples",
        "as long as sequence_length allows. No recipe was run on a GPU.",
    )


def _searched(recipe: Recipe) -> str:
    return "\n".join([recipe.name, recipe.title, recipe.model, recipe.losses, *recipe.datasets])


@recipes_app.command()
def show(name: Name) -> None:
    """Print a recipe: its source, what differs from it, and the config."""
    typer.echo(find_recipe(name).text, nl=False)


@recipes_app.command()
def copy(
    name: Name,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="File to write; NAME.yaml when absent.")] = None,
) -> None:
    """Copy a recipe to a file of yours, and print what to run next."""
    recipe = find_recipe(name)
    file = file or Path(f"{name}.yaml")
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(recipe.text)
    except FileExistsError:
        raise UserError(f"{file} exists; remove it, or pass a different FILE") from None
    except OSError as error:
        raise unusable_path(file, error.strerror) from None
    cluster = "" if recipe.nodes == 1 else " ray_address=HOST:PORT"
    ray = ["  pip install 'thresher[ray]'"] if recipe.num_gpus > 1 else []
    print_lines(
        f"wrote {file}; next:",
        *ray,
        f"  thresher plan {file} --gpu {recipe.gpu} --nodes {recipe.nodes} --gpus-per-node {recipe.gpus_per_node}",
        f"  thresher check {file}",
        f"  thresher train {file}{cluster}",
    )
