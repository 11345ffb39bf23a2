#!/usr/bin/env bash
# Trains scarce-llava on one GPU in stages that each fit a ten-minute call and go on from weights, and judges it.
#
#   runs/train_scarce.sh chain OUT COMMIT                  tower, language and acceptance in one call
#   runs/train_scarce.sh tower OUT MINUTES                 the tower alone
#   runs/train_scarce.sh language OUT MINUTES INIT ROUND   projector and decoder, from a tower or from an earlier round
#   runs/train_scarce.sh accept OUT WEIGHTS COMMIT         every method without training on the validation split
#
# OPTIONS is handed on to the training, for example OPTIONS="--spread-weight 2"; TOWER_MINUTES, LANGUAGE_MINUTES and
# ACCEPT_SECONDS are those of the chain; QUESTIONS and DEVICE those of the acceptance.
set -euo pipefail

stage=$1 out=$2
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src:$here/lab" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
mkdir -p "$out"

# shellcheck disable=SC2086  # options are words
train() { "$python" -m diffprune_lab.scarce.pretrain "$@" ${OPTIONS:-}; }

judge() { timeout "${ACCEPT_SECONDS:-600}" "$python" -m diffprune_lab.scarce.accept "$@"; }

accept() { # out, weights, commit: groups of methods side by side, then all judged together
    local out=$1 weights=$2 commit=$3 number=0 pids=() group options
    local common=(--weights "$weights" --questions "${QUESTIONS:-100}" --device "${DEVICE:-cuda}" --batch-size 256 --commit "$commit")
    for group in "random,feature_norm --no-curve" "gots,agilepruner,holov,uniform_grid,centre --no-curve --no-bounds" \
        "cls_attention,fastervlm,divprune,prunesid,vispruner --no-curve --no-bounds" \
        "mmtok,cdpruner,text_cluster --no-curve --no-bounds" "visionzip,tome,average_pool --no-curve --no-bounds" \
        "none --no-bounds" "fastv,pyramiddrop,sparsevlm --no-curve --no-bounds" \
        "sparsevlm-plus,dart,hidden_norm --no-curve --no-bounds"; do
        read -r -a options <<<"$group"
        number=$((number + 1))
        judge "${common[@]}" --methods "${options[@]}" --out "$out/part$number.json" >"$out/part$number.txt" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || echo "a part of the acceptance did not end"; done
    cat "$out"/part*.txt
    judge "${common[@]}" --out "$out/scarce_full.json" --join $(for part in "$out"/part*.answers.json; do echo "${part%.answers.json}.json"; done)
}

case $stage in
tower) train --stage tower --out "$out" --minutes "$3" ;;
language) train --stage language --init "$4" --out "$out" --minutes "$3" --round "${5:-0}" ;;
accept) accept "$out" "$3" "$4" ;;
chain)
    train --stage tower --out "$out/tower" --minutes "${TOWER_MINUTES:-2}"
    train --stage language --init "$out/tower" --out "$out/language" --minutes "${LANGUAGE_MINUTES:-5}"
    accept "$out" "$out/language" "$3"
    ;;
*) echo "there is no stage $stage: choose chain, tower, language or accept" >&2; exit 2 ;;
esac
