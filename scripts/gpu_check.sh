#!/usr/bin/env bash
# The check for a machine with one GPU; takes at most 8 minutes. Exit status 2 where there is none.
#
#   scripts/gpu_check.sh [PYTEST ARGS]
#
# CUDA-event profiling of layers; layers detached and attached; the state codec with torch's Adam
# and, where they are installed, TransformerEngine's and Apex's; device memory given back.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[[ -x $python ]] || python=$(command -v python3)

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu_check: this check needs a CUDA GPU and a torch built for it; $python sees none" >&2
  exit 2
fi

"$python" -c '
import torch
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")'
exec timeout 480 "$python" -m pytest tests/gpu -v -rs --timeout 320 "$@"
