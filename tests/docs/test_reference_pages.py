"""The generated pages of the docs are complete, and the drawn files are what their programs draw."""

from __future__ import annotations

import re

import chart
import docs_diagrams
import figure
import pytest
import reference_pages
from loss_formulas import FORMULAS, PAPERS
from search_terms import TERMS

from tests.docs.test_names import command_problem
from tests.support.paths import ROOT
from thresher.losses import describe, loss_names
from thresher.recipes.catalog import all_recipes


def test_every_command_has_an_example_with_options_that_it_has() -> None:
    assert reference_pages.EXAMPLES.keys() == reference_pages.commands().keys()
    for name, example in reference_pages.EXAMPLES.items():
        assert example.startswith(name)
        assert command_problem(example) is None, example


def test_no_command_shows_a_type_of_the_parser() -> None:
    assert re.findall(r"<\w+[^>]*>|x>=", reference_pages.render_cli()) == []


def test_every_loss_has_a_formula_and_a_paper() -> None:
    assert sorted(FORMULAS) == sorted(loss_names())
    assert {row.paper for row in describe()} <= PAPERS.keys()


@pytest.mark.parametrize("name", loss_names())
def test_the_formula_names_the_parameters_of_its_loss(name: str) -> None:
    formula, note = FORMULAS[name]
    symbols = {
        "beta": r"\beta",
        "label_smoothing": r"\varepsilon",
        "gamma": r"\gamma",
        "discopop_tau": r"\tau",
        "cpo_alpha": "c",
        "alphapo_alpha": "a",
        "dpop_lambda": r"\lambda",
        "desirable_weight": r"\lambda_D",
        "undesirable_weight": r"\lambda_U",
        "infonca_alpha": r"\alpha",
        "reward_scale": r"\eta",
        "center_rewards_coefficient": "c",
    }
    parameters = next(row.parameters for row in describe() if row.name == name)
    assert [each for each in parameters if symbols[each] not in formula] == []
    assert [
        each
        for each in symbols
        if each not in parameters and len(symbols[each]) > 1 and re.search(re.escape(symbols[each]) + r"(?!_)", formula)
    ] == []
    assert note.endswith((".", ")."))


def test_every_recipe_has_a_row_and_a_section() -> None:
    page = reference_pages.render_recipes()
    for recipe in all_recipes():
        assert f"| [{recipe.name}](#" in page
        section = page.partition(f"\n## {recipe.name}\n")[2].partition("\n## ")[0]
        stated = [recipe.source, recipe.model, recipe.expected, *recipe.differs]
        assert [each for each in stated if each not in section] == []


def test_every_search_term_leads_to_a_page_that_exists() -> None:
    assert [page for page in TERMS if not (ROOT / "docs" / f"{page}.md").is_file()] == []
    terms = [term for own in TERMS.values() for term in own]
    assert len(terms) == len(set(terms))


def test_the_diagrams_are_what_the_program_draws() -> None:
    for path, text in docs_diagrams.files().items():
        assert path.read_text(encoding="utf-8") == text, "stale; run scripts/docs_diagrams.py"


def test_the_summary_of_the_benchmarks_shows_the_figures_of_their_page() -> None:
    drawn = chart.summary(chart.PAGE.read_text(encoding="utf-8"))
    written = (ROOT / "docs" / "internals" / "speed_and_memory.svg").read_text(encoding="utf-8")
    assert written == drawn, "stale; run benchmarks/chart.py --summary docs/internals/speed_and_memory.svg"


def test_a_figure_that_stands_alone_follows_the_system() -> None:
    style = figure.style()
    assert "@media (prefers-color-scheme: dark)" in style
    for name, (light, dark) in figure.COLOURS.items():
        assert f"--{name}: {light};" in style
        assert f"--{name}: {dark};" in style


def test_text_of_a_figure_can_be_read_on_its_ground() -> None:
    """A contrast of 4.5 to 1, as WCAG asks for, in both themes."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = ["surface", *(f"{tint}-soft" for tint in figure.TINTS)]
    for theme in (0, 1):
        for text, ground in [(text, ground) for text in ("ink", "muted") for ground in grounds]:
            first, second = (luminance(figure.COLOURS[name][theme]) for name in (text, ground))
            ratio = (max(first, second) + 0.05) / (min(first, second) + 0.05)
            assert ratio >= 4.5, (text, ground, theme, ratio)
