#!/usr/bin/env bash
# The same by hand with torchrun, on each of two nodes: bash torchrun_two_nodes.sh HOST_OF_NODE_0 NODE_RANK CONFIG.yaml [...]
set -eu
host=$1 rank=$2
shift 2
# 29400 and all ports above 1023 must be open between the nodes, and closed to everybody else (docs/security.md).
exec torchrun --nnodes 2 --node-rank "$rank" --nproc-per-node "${GPUS:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "$host:29400" --rdzv-id megagrpo --max-restarts 0 \
  -m megagrpo.train "$@"
