#!/usr/bin/env bash
# On a machine with one NVIDIA GPU and without a network: checks and times, in at most 8 minutes.
# Where the files are no git checkout, say which commit they are of: COMMIT=... bash benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=$PWD exec timeout --kill-after=5 475 "${PYTHON:-python3}" benchmarks/gpu.py "$@"
