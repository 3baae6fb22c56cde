#!/usr/bin/env bash
# Run this example, in one process or on Ray workers (thresher[ray]): run_dpo_pipeline.sh [key=value ...], such as
#   run_dpo_pipeline.sh pretrain=PATH/SmolLM2-135M-Instruct.Q4_1.gguf actor_train.num_workers=2
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python}" "$here/../start_dpo_pipeline.py" --config_path "$here" --config_name dpo_config "$@"
