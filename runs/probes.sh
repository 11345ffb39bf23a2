#!/usr/bin/env bash
# Trains each backbone from scratch and runs every probe on it, in one go on one GPU; several backbones run side by side.
#
#   runs/probes.sh BACKBONES MINUTES DATA OUT [further options of diffprune probe]
#
#   runs/probes.sh "deit-tiny deit-small" 8   tiny-imagenet-40 out/probes
#   runs/probes.sh deit-base              9.3 tiny-imagenet-40 out/probes
#   runs/probes.sh deit-tiny 8 holdout out/holdout --train-data tiny-imagenet-40   # measure on other pictures
#
# OUT holds the results files and figures. What OUT or results/ holds already is not measured again, so a run that was
# cut short goes on where it stopped. Trained classifiers are kept in WEIGHTS (out/probe_weights where it is not set)
# and used again while they are there; they are not committed. COMMIT names the commit where there is no git checkout.
# The exit code is 0 only if every backbone is complete.
set -euo pipefail

backbones=$1 minutes=$2 data=$3 out=$4
shift 4
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
weights=${WEIGHTS:-$here/out/probe_weights}
export PYTHONPATH="$here/src" PYTHONUNBUFFERED=1 MPLBACKEND=Agg OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

mkdir -p "$out"
if [ "${RESUME:-1}" = 1 ]; then
    for name in coherence landscape alignment relevance probe_backbones; do
        [ -f "$out/$name.json" ] || [ ! -f "$here/results/$name.json" ] || cp "$here/results/$name.json" "$out/"
    done
fi

running=()
trap 'kill "${running[@]}" 2>/dev/null || true' EXIT
for backbone in $backbones; do
    classifier=(--save-weights "$weights/$backbone")
    [ ! -f "$weights/$backbone/training.json" ] || classifier=(--weights "$weights/$backbone")
    "$python" -m diffprune probe all --backbone "$backbone" --data "$data" --minutes "$minutes" --out "$out" \
        "${classifier[@]}" ${COMMIT:+--commit "$COMMIT"} "$@" > "$out/$backbone.log" 2>&1 &
    running+=($!)
done
failed=0
for process in "${running[@]}"; do wait "$process" || failed=1; done
running=()
trap - EXIT
for backbone in $backbones; do grep -E "^($backbone|diffprune:)" "$out/$backbone.log" | tail -n 25 || true; done
exit $failed
