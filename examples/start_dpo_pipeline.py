"""Run `thresher train` with a config given by directory and name, as users of ROLL do.

    python examples/start_dpo_pipeline.py --config_path polite_smollm2 --config_name dpo_config [key=value ...]

The directory is relative to the current directory, or else to the directory of this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from thresher.cli import main


def config_file(directory: str, name: str) -> Path:
    places = (Path(directory), Path(__file__).parent / directory)
    found = next((place for place in places if place.is_dir()), places[0])
    return found / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config_path", default="config", help="directory of the config")
    parser.add_argument("--config_name", default="dpo_config", help="name of the config, with or without .yaml")
    parser.add_argument("overrides", nargs="*", help="overrides: key=value ...")
    arguments = parser.parse_args()
    sys.argv = ["thresher", "train", str(config_file(arguments.config_path, arguments.config_name))]
    sys.argv += arguments.overrides
    main()
