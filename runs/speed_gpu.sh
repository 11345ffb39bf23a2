#!/usr/bin/env bash
# The speed of the fast path at real size on one quiet GPU, random weights: its tests, then a row for every aim.
#
#   runs/speed_gpu.sh OUT COMMIT [part ...]
#
#   runs/speed_gpu.sh "$OUT" abc1234                            all parts, about twelve minutes on an H200
#   runs/speed_gpu.sh "$OUT" abc1234 next qwen                  these alone
#   SIZE="--size tiny --device cpu" runs/speed_gpu.sh out/tiny abc1234 llava next qwen batch     on a CPU, in small
#
# Parts: tests llava fp8 next qwen batch training. Each has its own time (seconds in brackets below) and writes a row as
# soon as it is there; what fails does not stop the rest. OUT gets gpu_tests.txt, ttft_speed.json, ttft_next.json,
# ttft_qwen_speed.json, fp8.json and train_7b.json.
set -uo pipefail

out=$1 commit=$2
shift 2
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$here"
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg TRANSFORMERS_VERBOSITY=error
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

profile() { # seconds, options
    local seconds=$1
    shift
    # shellcheck disable=SC2086  # options are words
    timeout $((seconds + 30)) "$python" -m diffprune_lab profile --random-weights --commit "$commit" --paths fast --text 40 \
        --text-buckets 40 --no-decode --seconds "$seconds" --figure "$scratch/bars.png" ${SIZE:---dtype float16} "$@" 2>&1 |
        grep -aE "ms |rror|not run" | cut -c1-200
}

run_part() {
    case $1 in
    tests) # [220]
        SECONDS_LEFT=220 runs/gpu_tests.sh "$out" 8 tests/fast
        ;;
    llava) # [70] LLaVA-1.5-7B, 576 to 64: top-K and the diverse choice.
        profile 70 --backbone llava-1.5-7b --methods full,diffprune,diffprune-diverse --keep 64 --kernels 14 --out "$out/ttft_speed.json"
        ;;
    batch) # [60] The same, 32 prompts at once.
        profile 60 --backbone llava-1.5-7b --methods full,diffprune --keep 64 --batch 32 --append --out "$out/ttft_speed.json"
        ;;
    fp8) # [60 + 60] The same in 8 bits, and how far logits are off in 16 and in 8 bits.
        profile 60 --backbone llava-1.5-7b --methods full,diffprune --keep 64 --precision fp8 --kernels 14 --append --out "$out/ttft_speed.json"
        # shellcheck disable=SC2086
        timeout 60 "$python" -m diffprune.speed.precision --backbone llava-1.5-7b ${SIZE:-} --commit "$commit" --out "$out/fp8.json" 2>&1 | tail -n 3
        ;;
    next) # [80] LLaVA-NeXT-7B, 2,880 to 640, 320 and 160.
        profile 80 --backbone llava-next-7b --methods full,diffprune --keep "${NEXT_KEEP:-320,640,160}" --image 672x672 --kernels 14 --out "$out/ttft_next.json"
        ;;
    qwen) # [90] Qwen2.5-VL-7B, 1,296 to 144, and the kernels that its tower and scorer spend their time in.
        profile 90 --backbone qwen2.5-vl-7b --methods "full,diffprune,diffprune[groups=merged]" --keep 0.1111 --image 1008x1008 --kernels 14 --out "$out/ttft_qwen_speed.json"
        ;;
    training) # [120] The 7B scorer: plain, compiled and with cached features, and where a step's time goes.
        timeout 150 "$python" -m diffprune_lab.studies.train_size --device cuda --seconds "${TRAINING_SECONDS:-100}" --kernels 14 \
            --models llava-1.5-7b --variants plain,compiled,cached --commit "$commit" --out "$out/train_7b.json" | cut -c1-160
        ;;
    *) echo "there is no part $1" >&2; return 2 ;;
    esac
}

[ $# -gt 0 ] || set -- tests llava next qwen fp8 batch training
for part in "$@"; do
    run_part "$part"
    echo "== $part ended after $SECONDS s"
done
