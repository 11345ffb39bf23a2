#!/usr/bin/env bash
# What `deterministic: true` costs and gives: trains the scorer of scenes-llava twice each way with one seed, compares the
# weights of the two, and prints the samples per second of each run.
#
#   runs/deterministic.sh OUT [OVERRIDE ...]        one GPU, about two minutes with 200 steps
set -euo pipefail

out=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
export PYTHONPATH=$here/src:$here/lab HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
mkdir -p "$out"
for way in false true; do
    for run in 1 2; do
        folder=$out/deterministic-$way-$run
        "${PYTHON:-python3}" -m diffprune_lab train --json --config lab/configs/scenes_llava/diffprune_any.yaml --out "$folder" \
            "deterministic=$way" optim.steps=200 optim.batch_size=16 optim.accumulate=1 optim.precision=float32 \
            data.validation=64 validation.every=1.0 saving.tensorboard=false "$@" >"$folder.json" 2>"$folder.log"
        "${PYTHON:-python3}" -c "import json,sys; d=json.load(open(sys.argv[1])); print('deterministic=$way run $run:', round(d['samples_s'], 1), 'samples/s, hard loss', d['best']['hard'])" "$folder.json"
        grep -h "deterministic" "$folder.log" | sort | uniq -c | head -5 || true
    done
    cmp -s "$out/deterministic-$way-1/model.safetensors" "$out/deterministic-$way-2/model.safetensors" &&
        echo "deterministic=$way: weights of both runs are equal" || echo "deterministic=$way: weights of both runs differ"
done
