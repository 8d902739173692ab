#!/usr/bin/env bash
# Trains on several nodes under Slurm: sbatch slurm.sh
#
# To set: partition, account, time and nodes below; OUT, a folder that all nodes share; ENVIRONMENT.
# Here every node has one task, and each task one CPU device: one replica per node.
# With GPUs, one task per GPU, all of which every task must see (jax takes number SLURM_LOCALID):
#   #SBATCH --gpus-per-node=4
#   #SBATCH --ntasks-per-node=4
# and no --gpus-per-task or --gpu-bind.
#
# Checked for syntax; not run on a Slurm cluster.
#SBATCH --job-name=jaxslowmo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
# Two minutes before the time is over (Slurm may be a minute early) all tasks get SIGTERM: the run
# is saved and ends with code 0.
#SBATCH --signal=TERM@120
# A job whose node failed or that was preempted starts again, from its last checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

OUT=${OUT:-$PWD/runs/slurm}
ENVIRONMENT=${ENVIRONMENT:-$PWD/.venv}
MAX_REQUEUES=${MAX_REQUEUES:-10}
source "$ENVIRONMENT/bin/activate"

# Without --kill-on-bad-exit the other tasks may end by themselves when one is lost, and say which.
rm -f "$OUT/summary.json"
code=0
srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  python -m jaxslowmo train \
  --preset 10m --algorithm slowmo --steps 20000 \
  --replicas "$SLURM_NTASKS" --out "$OUT" --process-logs \
  --checkpoint-every 500 --resume --fallback "$@" || code=$?

# srun returns the highest code of its tasks. 75: another task was lost; above 128: killed.
again=false
if ((code == 75 || code > 128)); then again=true; fi
if ((code == 0)) && grep -qs '"status": "preempted"' "$OUT/summary.json"; then again=true; fi
if $again && ((${SLURM_RESTART_COUNT:-0} < MAX_REQUEUES)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
