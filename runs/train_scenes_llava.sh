#!/usr/bin/env bash
# Trains both reference models on one GPU, side by side. The small one waits for its few data workers most of the time,
# so the large one gets nearly all of the card. If one fails, the other is ended too.
#
#   runs/train_scenes_llava.sh STAGE ROUND MINUTES INIT OUT
#
#   runs/train_scenes_llava.sh tower    0 4.0 -         out/tower
#   runs/train_scenes_llava.sh language 0 5.3 out/tower out/first
#   runs/train_scenes_llava.sh language 1 8.0 out/first out/second
#
# INIT and OUT hold the folders llava/ and nano/; a stage ends after MINUTES, start-up and compiling included.
# LLAVA_OPTIONS and NANO_OPTIONS are handed on, for example LLAVA_OPTIONS="--lr 5e-4 --weights gqa=30". Then:
#
#   for m in llava nano; do
#     python -m diffprune_lab.pretrain.llava --model scenes-$m --stage package --init out/second/$m \
#         --logs out/first/$m out/tower/$m --out lab/diffprune_lab/assets/scenes-$m
#   done
set -euo pipefail

stage=$1 round=$2 minutes=$3 init=$4 out=$5
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src:$here/lab" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

train() { # model, workers, further options
    local model=$1 workers=$2 start=()
    shift 2
    [ "$init" = - ] || start=(--init "$init/$model")
    exec "$python" -m diffprune_lab.pretrain.llava --model "scenes-$model" --stage "$stage" --round "$round" \
        --minutes "$minutes" "${start[@]}" --out "$out/$model" --workers "$workers" "$@"
}

# shellcheck disable=SC2086  # options are words
train llava 9 ${LLAVA_OPTIONS:-} > >(sed "s/^/llava /") 2>&1 &
large=$!
# shellcheck disable=SC2086
train nano 4 ${NANO_OPTIONS:-} > >(sed "s/^/nano  /") 2>&1 &
small=$!
trap 'kill "$large" "$small" 2>/dev/null || true' EXIT
wait -n
wait "$large"
wait "$small"
