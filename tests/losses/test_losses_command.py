"""`thresher losses`: the table that a person chooses a loss from."""

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
        for i, (parameter, default) in enumerate(row.parameters.items()):  # one parameter per line
            assert f"{parameter}={default:g}" in lines[start + i]
        assert ("yes" if row.needs_reference else "no") in line.split()


def test_command_does_not_import_torch_before_it_runs():
    code = "import sys, thresher.cli.losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
