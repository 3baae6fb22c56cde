"""`thresher losses`: the table of all losses."""

import io
import subprocess
import sys

from rich.console import Console

from thresher.cli.losses import losses_table
from thresher.losses import describe


def test_table_shows_every_loss_with_its_parameters():
    buffer = io.StringIO()
    Console(file=buffer, width=200).print(losses_table())
    lines = buffer.getvalue().splitlines()
    for row in describe():
        ((start, line),) = [(i, line) for i, line in enumerate(lines) if f" {row.name} " in line]
        assert row.paper in line
        assert row.summary in line
        parameters = lines[start + 1].strip("│ \n")
        if row.parameters:
            assert parameters == ", ".join(f"{name}={default:g}" for name, default in row.parameters.items())
        assert ("yes" if row.needs_reference else "no") in line.split()


def test_command_does_not_import_torch_before_it_runs():
    code = "import sys, thresher.cli.losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
