#!/usr/bin/env bash
# Trains scarce-llava on one GPU in stages that each fit a ten-minute call and go on from weights.
#
#   runs/train_scarce.sh trial OUT               towers of several settings side by side, then language on the fittest
#   runs/train_scarce.sh tower OUT MINUTES       the tower alone
#   runs/train_scarce.sh language OUT MINUTES INIT ROUND
#
# OPTIONS is handed on, for example OPTIONS="--pixel-weight 2".
set -euo pipefail

stage=$1 out=$2
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src:$here/lab" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
mkdir -p "$out"

train() { "$python" -m diffprune_lab.scarce.pretrain "$@"; }

# shellcheck disable=SC2086  # options are words
case $stage in
tower) train --stage tower --out "$out" --minutes "$3" ${OPTIONS:-} ;;
language) train --stage language --init "$4" --out "$out" --minutes "$3" --round "${5:-0}" ${OPTIONS:-} ;;
trial)
    pids=()
    for weight in ${WEIGHTS:-0.3 1.5}; do
        train --stage tower --out "$out/tower-$weight" --minutes "${TOWER_MINUTES:-3.2}" --workers 6 \
            --spread-weight "$weight" ${OPTIONS:-} > >(sed "s/^/$weight /") 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
    # The tower whose best method without training covers closest to 0.83 of what is needed.
    best=$("$python" - "$out" <<'PY'
import json, sys
from pathlib import Path
def distance(folder):
    checks = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines() if '"check"' in line]
    covered = checks[-1]["covered"]
    return abs(max(value for name, value in covered.items() if name != "oracle") - 0.83)
print(min(Path(sys.argv[1]).glob("tower-*"), key=distance))
PY
)
    echo "chosen $best"
    train --stage language --init "$best" --out "$out/language" --minutes "${LANGUAGE_MINUTES:-5.6}"
    ;;
*) echo "there is no stage $stage: choose trial, tower or language" >&2; exit 2 ;;
esac
