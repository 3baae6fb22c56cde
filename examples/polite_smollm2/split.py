"""Split a JSON list of pairs into train.json and validation.json: every tenth row is for validation.

python split.py ROWS.json OUTPUT_DIR
"""

import json
import sys
from pathlib import Path


def main(source: str, output: str) -> None:
    rows = json.loads(Path(source).read_text())
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (
        ("train", [row for i, row in enumerate(rows) if i % 10 != 0]),
        ("validation", [row for i, row in enumerate(rows) if i % 10 == 0]),
    ):
        (directory / f"{name}.json").write_text(json.dumps(part, indent=1))
        print(f"{directory / f'{name}.json'}: {len(part)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:3])
