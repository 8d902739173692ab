#!/usr/bin/env bash
# Trains on several Cloud TPU slices, as one queued resource:
#   cloud_tpu_multislice.sh create | install | train OPTIONS... | stop | delete
#
# To set, in the environment or here: PROJECT, ZONE, NAME; SLICES; TYPE with its RUNTIME,
# HOSTS_PER_SLICE and CHIPS_PER_HOST; SOURCE, what pip installs; OUT, a folder that all hosts of all
# slices share at the same path, such as a mounted Filestore share. Before, for gcloud to reach
# several hosts: ssh-add ~/.ssh/google_compute_engine
# A slice is a replica, and its chips share the replica's batch; parameters travel between slices.
#
# Checked for syntax; not run on Cloud TPU.
set -euo pipefail

PROJECT=${PROJECT:?the project to pay for it}
ZONE=${ZONE:-us-west4-a}
NAME=${NAME:-jaxslowmo}
SLICES=${SLICES:-4}
TYPE=${TYPE:-v5litepod-16}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
HOSTS_PER_SLICE=${HOSTS_PER_SLICE:-4}
CHIPS_PER_HOST=${CHIPS_PER_HOST:-4}
OUT=${OUT:-/mnt/shared/runs/multislice}

where=(--project "$PROJECT" --zone "$ZONE")

# The same command on every host of every slice, all at once: they wait for each other.
everywhere() {
  gcloud compute tpus queued-resources ssh "$NAME" "${where[@]}" --node=all --worker=all \
    --batch-size=all --command "$1"
}

command=${1:?create, install, train, stop or delete}
shift
case $command in
create)
  gcloud compute tpus queued-resources create "$NAME" "${where[@]}" \
    --accelerator-type "$TYPE" --runtime-version "$RUNTIME" \
    --node-count "$SLICES" --node-prefix "$NAME"
  echo "Wait until ACTIVE: gcloud compute tpus queued-resources describe $NAME ${where[*]}"
  ;;
install)
  : "${SOURCE:?what pip installs: /shared/WHEEL[train], or jaxslowmo[train] @ git+https://ADDRESS}"
  everywhere "python3 -m venv ~/venv && ~/venv/bin/pip install '$SOURCE' 'jax[tpu]'"
  ;;
train)
  # A TPU VM tells its place only to who asks its metadata server: --cluster gcetpu. Code 75, where
  # a host was lost: the same command again goes on from the last checkpoint.
  everywhere "exec ~/venv/bin/python -m jaxslowmo train --cluster gcetpu \
    --replicas $SLICES --mesh device=$((HOSTS_PER_SLICE * CHIPS_PER_HOST)) --batch 128 \
    --preset 124m --dtype bfloat16 --mode host --out '$OUT' --process-logs \
    --checkpoint-every 500 --resume --fallback $*"
  ;;
stop)
  # Saves and ends. The oldest is the parent; the brackets keep the pattern from finding itself.
  everywhere "pkill -TERM -o -f '[j]axslowmo train'"
  ;;
delete)
  gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force
  ;;
*)
  echo "error: create, install, train, stop or delete, not $command" >&2
  exit 2
  ;;
esac
