"""CI runs every value of every parameter of the tests whose cases it does not run all.

`pytest tests/repository/test_ci_cases.py --write-tables` writes the table in tests/covered.md anew.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.support.ci_cases import Case, choose, render_table
from tests.support.engines import parity_cases
from tests.support.engines.parity import mesh_text
from tests.support.paths import ROOT

PAGE = ROOT / "tests" / "covered.md"
BEGIN, END = "<!-- covered cases: begin -->", "<!-- covered cases: end -->"
PARITY = "tests/engines/test_parity.py::test_three_steps_on_every_mesh_equal_the_oracle"


@pytest.fixture(scope="module")
def tests(tmp_path_factory) -> Mapping[str, Sequence[Case]]:
    """The cases of the tests marked `covered`, in a selection of whole files."""
    file = tmp_path_factory.mktemp("cases") / "covered"
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.covered" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--covered-cases", str(file)]
    done = subprocess.run([*command, *map(str, marked)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found: Mapping[str, Sequence[Case]] = pickle.loads(file.read_bytes())  # noqa: S301  # written by the command
    return found


def test_every_value_has_a_case_in_ci(tests):
    for test, cases in tests.items():
        values = {value for case in cases for value in case.values}
        in_ci = {value for case in cases if case.in_ci for value in case.values}
        assert values - in_ci == set(), test


def test_every_value_of_the_parity_matrix_and_every_mesh_with_every_layout_runs_in_ci(tests):
    in_ci = {value for case in tests[PARITY] if case.in_ci for value in case.values}
    for sizes in parity_cases.MESHES:
        for layout in parity_cases.row_layouts(sizes):
            assert ("mesh, layout", f"{mesh_text(sizes)}, {layout}") in in_ci
    assert {("loss", loss) for loss in parity_cases.LOSSES} <= in_ci
    assert {("family", family) for family in parity_cases.FAMILIES} <= in_ci
    assert {("also, family", case.case_values["also, family"]) for case in parity_cases.MATRIX} <= in_ci


def test_the_table_of_covered_cases_is_what_ci_runs(tests, request):
    before, _, rest = PAGE.read_text().partition(BEGIN)
    shown, _, after = rest.partition(END)
    table = render_table(tests)
    if request.config.getoption("--write-tables"):
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    else:
        assert shown.strip() == table, "write it anew: pytest tests/repository/test_ci_cases.py --write-tables"


def test_the_choice_is_small_and_prefers_cheap_cases():
    values = [frozenset({("a", x), ("b", y)}) for x in "123" for y in "45"]
    chosen = choose(values, [1.0] * len(values))
    assert len(chosen) == 3
    same = [frozenset({("a", "1")})] * 3
    assert choose(same, [4, 2, 2]) == [1]
