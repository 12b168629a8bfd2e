#!/bin/bash
# Runs a program on several machines with torchrun, or any launcher like it. Start it on
# each of them, with the name of one machine, the same for all:
#
#     ./torchrun.sh machine-0 train.py --run-dir runs/a
#
# With several processes on a machine (NUM_LOCAL), each takes one GPU.

set -euo pipefail

head="$1"
shift

exec torchrun \
  --nnodes="${NUM_MACHINES:-2}" \
  --nproc-per-node="${NUM_LOCAL:-1}" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="${head}:29400" \
  --rdzv-id="${RUN_ID:-train}" \
  "$@"
