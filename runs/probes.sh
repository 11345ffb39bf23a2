#!/usr/bin/env bash
# Trains each backbone from scratch and runs every probe on it, in one go on one GPU; several backbones run side by side.
#
#   runs/probes.sh BACKBONES MINUTES DATA OUT [further options of diffprune probe]
#
#   runs/probes.sh "deit-tiny deit-small deit-base" 9.1 tiny-imagenet-40 out/probes
#   runs/probes.sh "deit-tiny deit-small deit-base" 3   tiny-imagenet-40 out/probes      # what the first had no time for
#   runs/probes.sh deit-tiny 8 holdout out/holdout --train-data tiny-imagenet-40         # measure on other pictures
#
#   SEEDS="42 123 456 789 1000" runs/probes.sh deit-tiny 8 tiny-imagenet-40 out/probes   # side by side
#
# With SEEDS each seed is a process of its own as soon as the classifier is there: a GPU that small models leave idle is
# done sooner.
#
# OUT holds the results files, figures and logs. What it holds already is not measured again, so a run that was cut short
# goes on where it stopped; with RESUME=1 that is also true of results/, which must then have been made with the same
# settings. Trained classifiers and scorers are kept in WEIGHTS (out/probe_weights by default) and used again while
# they are there; they are not committed. COMMIT names the commit where there is no git checkout. MPS=0 keeps the processes
# from sharing the GPU at the same time. The exit code is 0 only if every backbone is complete.
set -euo pipefail

read -ra seeds <<<"${SEEDS:-}"
backbones=$1 minutes=$2 data=$3 out=$4
shift 4
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
weights=${WEIGHTS:-$here/out/probe_weights}
export PYTHONPATH="$here/src:$here/lab" PYTHONUNBUFFERED=1 MPLBACKEND=Agg OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export TORCHDYNAMO_SUPPRESS_ERRORS=1 # what cannot be compiled runs as it is

mkdir -p "$out"
if [ "${RESUME:-0}" = 1 ]; then
    for name in coherence landscape alignment relevance probe_backbones; do
        [ -f "$out/$name.json" ] || [ ! -f "$here/results/$name.json" ] || cp "$here/results/$name.json" "$out/"
    done
fi

# shellcheck source=runs/side_by_side.sh
. "$here/runs/side_by_side.sh"
is_shared=${CUDA_MPS_PIPE_DIRECTORY:+yes} # by whoever started this
: "${MPS:=1}"
[ "$is_shared" = yes ] || share_gpu

running=()
finish() {
    [ ${#running[@]} -eq 0 ] || kill "${running[@]}" 2>/dev/null || true
    [ "$is_shared" = yes ] || [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || stop_sharing || true
}
trap finish EXIT
probe() { # backbone, log's name, minutes, further options
    local backbone=$1 log=$2 time=$3
    shift 3
    "$python" -m diffprune_lab probe all --backbone "$backbone" --data "$data" --minutes "$time" --out "$out" \
        ${COMMIT:+--commit "$COMMIT"} "$@" >>"$out/$log.log" 2>&1 &
    running+=($!)
}
for backbone in $backbones; do
    classifier=(--save-weights "$weights/$backbone")
    [ ! -f "$weights/$backbone/training.json" ] || classifier=(--weights "$weights/$backbone")
    probe "$backbone" "$backbone" "$minutes" "${classifier[@]}" ${seeds:+--seeds "${seeds[0]}"} "$@"
done
missing=
if [ ${#seeds[@]} -gt 1 ]; then # the first seed's process trains the classifier, the others wait for it
    waiting=$backbones
    while [ -n "$waiting" ]; do
        sleep 1
        trainers=$(jobs -r -p) # before the files are looked for: one that ends in between has left its file
        still=
        for backbone in $waiting; do
            if [ -f "$weights/$backbone/training.json" ]; then
                for seed in "${seeds[@]:1}"; do
                    left=$("$python" -c "print(round($minutes - $SECONDS / 60, 2))")
                    probe "$backbone" "$backbone-$seed" "$left" --weights "$weights/$backbone" --seeds "$seed" "$@"
                done
            else
                still+=" $backbone"
            fi
        done
        waiting=$still
        [ -n "$trainers" ] || break # none is left that could train one
    done
    missing=$waiting
fi
failed=0
for process in "${running[@]}"; do wait "$process" || failed=1; done
running=()
for backbone in $backbones; do
    for log in "$out/$backbone"*.log; do grep -aE "^($backbone|diffprune:)" "$log" | tail -n 25 || true; done
done
for backbone in $missing; do
    echo "$backbone: no classifier was trained, so seeds ${seeds[*]:1} were not run; begin SEEDS with one that is not done" >&2
    failed=1
done
exit $failed
