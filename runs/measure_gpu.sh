#!/usr/bin/env bash
# Everything that is measured on one quiet GPU at real size, random weights: speed, memory, selection.
#
#   runs/measure_gpu.sh OUT COMMIT [part ...]
#
#   runs/measure_gpu.sh out/results abc1234                     all parts, about twelve minutes on an H200
#   runs/measure_gpu.sh out/results abc1234 ttft batch          these alone
#   SIZE="--size tiny --device cpu" runs/measure_gpu.sh out/tiny abc1234 ttft batch qwen throughput     on a CPU, in small
#
# Parts: ttft batch qwen next throughput selection training backbones. Each has its own time and writes as it
# goes; what fails does not stop the rest. OUT gets the files for results/. runs/gpu_tests.sh has the tests.
set -uo pipefail

out=$1 commit=$2
shift 2
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg TRANSFORMERS_VERBOSITY=error
mkdir -p "$out"

profile() { # seconds, options
    local seconds=$1
    shift
    # shellcheck disable=SC2086  # options are words
    timeout $((seconds + 30)) "$python" -m diffprune_lab profile --random-weights --commit "$commit" --text-buckets 40,100 \
        --seconds "$seconds" ${SIZE:---dtype float16} "$@" 2>&1 | grep -aE "ms |rror|not run" | cut -c1-160
}

llava="--backbone llava-1.5-7b --keep 64"
run_part() {
    case $1 in
    # Every method on both paths in one process, the first text length of all first.
    ttft)
        # shellcheck disable=SC2086
        profile 220 $llava --text 40,100 --batch 1 --decode-methods full,diffprune --out "$out/ttft.json" --methods \
            full,diffprune,pyramiddrop,cls_attention,holov,divprune,visionzip,prunesid,random,feature_norm,uniform_grid,fastv
        ;;
    # shellcheck disable=SC2086
    batch) profile 85 $llava --methods full,diffprune --text 40,100 --batch 32 --paths fast --no-decode --append --out "$out/ttft.json" ;;
    qwen)
        profile 135 --backbone qwen2.5-vl-7b --methods full,diffprune,holov,divprune,random,feature_norm --keep 0.1111 \
            --eager-methods full,diffprune --decode-methods full,diffprune --image 1008x1008 --text 40,100 --batch 1 \
            --out "$out/ttft_qwen.json"
        ;;
    next)
        profile 90 --backbone llava-next-7b --methods full,diffprune --keep 320 --image 672x672 --text 40 --batch 1 \
            --out "$out/ttft_next.json"
        ;;
    throughput)
        # shellcheck disable=SC2086
        profile 110 $llava --throughput --methods full,diffprune --paths fast --text 40 --batch 1,8,32,64 --out "$out/throughput.json"
        ;;
    selection)
        timeout $((${SELECTION_SECONDS:-70} + 25)) "$python" -m diffprune_lab.studies.selection --device cuda --seconds "${SELECTION_SECONDS:-70}" \
            --commit "$commit" --out "$out/selection_time.json" | tail -n 1
        ;;
    training)
        timeout 110 "$python" -m diffprune_lab.studies.train_size --device cuda --seconds "${TRAINING_SECONDS:-75}" --variants plain,checkpointing \
            --commit "$commit" --out "$out/train_7b.json" | cut -c1-120
        ;;
    backbones) timeout 280 "$python" -m diffprune_lab.studies.real_size --commit "$commit" --out "$out/backbones_7b.json" | tail -n 2 ;;
    *) echo "there is no part $1" >&2; return 2 ;;
    esac
}

[ $# -gt 0 ] || set -- ttft batch training selection qwen next throughput backbones
for part in "$@"; do
    run_part "$part"
    echo "== $part ended after $SECONDS s"
done
