#!/usr/bin/env bash
# Run this example on the GPUs of its device_mapping: run_dpo_pipeline.sh [key=value ...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python}" "$here/../start_dpo_pipeline.py" --config_path "$here" --config_name dpo_config "$@"
