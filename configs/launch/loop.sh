#!/usr/bin/env bash
# Runs a command that trains again and again, until the run is done.
#
#   WORKDIR=runs/long configs/launch/loop.sh python -m train.run --workdir runs/long --resume
#
# What the exit code of the command means:
#   0     done, where the checkpoint of the last step is in WORKDIR; else a signal to this process
#         or to another one of the run stopped it, and it goes on
#   1, 2  training went bad, bad input: neither mends itself, stop
#   else  a crash, another process is gone: start again
# A SIGTERM to the loop is passed on, and the loop ends with 143 once the run has saved, so that a
# scheduler knows that it is to be started again. RESTARTS is how many times it is started again at
# most, PAUSE the seconds before that.
set -u

: "${WORKDIR:?set it to the --workdir of the run}"
restarts=${RESTARTS:-100}
pause=${PAUSE:-10}
child=
told_to_stop=

trap 'told_to_stop=yes; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null' TERM
trap 'told_to_stop=yes' INT # Ctrl-C reaches the command by itself

is_done() {
  local steps
  steps=$(sed -n 's/^  "num_steps": \([0-9]*\),$/\1/p' "$WORKDIR/config.json" 2>/dev/null)
  [[ -n $steps && -d $WORKDIR/checkpoints/$steps ]]
}

for ((start = 0; ; start++)); do
  "$@" &
  child=$!
  [[ -z $told_to_stop ]] || kill -TERM "$child" # it came in the line before
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ended the wait: the run is saving
    wait "$child"
    code=$?
  done
  child=
  if [[ $code == 0 ]] && is_done; then exit 0; fi
  if [[ $code == 1 || $code == 2 ]]; then exit "$code"; fi
  echo "loop.sh: not done, exit code $code" >&2
  if [[ $code == 0 || -n $told_to_stop ]]; then code=143; fi
  if ((start >= restarts)); then
    echo "loop.sh: no restarts left of $restarts" >&2
    exit "$code"
  fi
  if [[ -z $told_to_stop ]]; then
    echo "loop.sh: starting again in $pause s" >&2
    sleep "$pause" &
    wait $! # not `sleep` alone: a signal ends a wait at once
  fi
  if [[ -n $told_to_stop ]]; then exit 143; fi
done
