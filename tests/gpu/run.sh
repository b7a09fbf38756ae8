#!/usr/bin/env bash
# Checks all that touches CUDA, on a machine with one NVIDIA GPU and a torch that can use it: figures, then pass or fail.
# Under 8 minutes. Skips with its reason where there is no GPU (exit 0); `--device cpu` tries the checks themselves.
#   PYTHON=python3 tests/gpu/run.sh [--device cuda|cpu] [--megabytes N] [CHECK ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
exec timeout 480 "${PYTHON:-python3}" -m tests.gpu.checks "$@"
