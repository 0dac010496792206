#!/usr/bin/env bash
# Trains on a Cloud TPU VM or on all hosts of a pod slice. Run it where gcloud is set up:
#
#   configs/launch/cloud_tpu.sh TPU_NAME ZONE          starts it; `stop` after ZONE stops it
#
# Before: `gcloud compute tpus tpu-vm create`, on every host the checkout with its environment in
# ~/jaxamp/venv (`pip install -e '.[tpu]'`), and at $SHARED a directory that all hosts share
# (Filestore or another NFS) with train.bin and val.bin. The log is ~/jaxamp/train.log on each host.
set -euo pipefail

if [[ $# -lt 2 ]]; then
  echo "usage: $0 TPU_NAME ZONE [stop]" >&2
  exit 2
fi
shared=${SHARED:-/mnt/shared}

# --distributed.auto: the hosts of a pod slice learn of each other when JAX asks.
# setsid and nohup: the loop outlives the ssh connection.
start="cd ~/jaxamp || exit
WORKDIR=$shared/gpt2-small setsid nohup configs/launch/loop.sh \
  venv/bin/python -m train.run \
  --config configs/gpt2-small.toml \
  --data.path $shared/train.bin \
  --data.eval-path $shared/val.bin \
  --workdir $shared/gpt2-small \
  --resume \
  --distributed.auto \
  --mesh.data 1 \
  --mesh.fsdp -1 \
  >>train.log 2>&1 </dev/null &
echo \$! >train.pid"
stop="kill -TERM \$(cat ~/jaxamp/train.pid)"

if [[ ${3:-} == stop ]]; then command=$stop; else command=$start; fi
gcloud compute tpus tpu-vm ssh "$1" --zone "$2" --worker all --command "$command"
