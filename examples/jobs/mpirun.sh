#!/usr/bin/env bash
# Trains in several processes started by Open MPI 4.1 (Debian: openmpi-bin): mpirun.sh OPTIONS...
#
# To set, in the environment: PROCESSES; HOSTFILE, with lines such as "node1 slots=1", for more than
# this machine; OUT, a folder that all hosts share; PYTHON. What follows the name goes to `train`.
# As root: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1. For more processes than cores:
# OMPI_MCA_rmaps_base_oversubscribe=1. With a chosen port: JAX_COORDINATOR_PORT=12345, which mpirun
# hands on with -x. Process 0 must run on the machine of mpirun: name it first in HOSTFILE.
#
# Run by tests/cluster/test_mpirun.py: 4 processes on one machine.
set -euo pipefail

PROCESSES=${PROCESSES:-4}
OUT=${OUT:-$PWD/runs/mpirun}
PYTHON=${PYTHON:-python}
options=()
if [[ -n ${HOSTFILE:-} ]]; then options+=(--hostfile "$HOSTFILE"); fi
if [[ -n ${JAX_COORDINATOR_PORT:-} ]]; then options+=(-x JAX_COORDINATOR_PORT); fi

# Not bound to cores: each process has many threads. SIGTERM to mpirun ends the run with a
# checkpoint, and mpirun with code 1: it tells the processes after 30 seconds, and kills them after
# 30 more. Without the option both are one second. Started again, the run goes on.
exec mpirun -np "$PROCESSES" --bind-to none --mca odls_base_sigkill_timeout 30 \
  ${options[@]+"${options[@]}"} \
  "$PYTHON" -m jaxslowmo train \
  --replicas "$PROCESSES" --out "$OUT" --checkpoint-every 500 --resume "$@"
