#!/usr/bin/env bash
# Greedy choices on one quiet GPU: how long a choice takes with and without the kernels, and the time to the first token
# of LLaVA-1.5-7B with each. About 150 s on an H200; what fails does not stop the rest.
#
#   runs/choice_gpu.sh OUT COMMIT [part ...]
#
#   runs/choice_gpu.sh out/choice abc1234                   all parts
#   runs/choice_gpu.sh out/choice abc1234 ttft              that alone
#
# Parts: times ttft large. OUT gets selection_greedy.json, selection_large.json, ttft_choice.json.
set -uo pipefail

out=$1 commit=$2
shift 2
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg TRANSFORMERS_VERBOSITY=error
mkdir -p "$out"
greedy=diffprune-diverse,divprune,gots,cdpruner,mmtok

run_part() {
    case $1 in
    # 576 and 2,880 tokens, batches of 1 and 32, kernels and plain torch side by side.
    times)
        timeout 80 "$python" -m diffprune_lab.studies.selection --device cuda --size middle --methods diffprune,$greedy \
            --reference --seconds 55 --commit "$commit" --out "$out/selection_greedy.json" 2>&1 | tail -n 40
        ;;
    ttft)
        timeout 110 "$python" -m diffprune_lab profile --random-weights --backbone llava-1.5-7b --keep 64 --dtype float16 \
            --text 40 --text-buckets 40 --batch 1 --paths fast --no-decode --seconds 85 --commit "$commit" \
            --methods full,diffprune,diffprune-diverse,divprune,gots,'diffprune-diverse[features=scorer]' \
            --out "$out/ttft_choice.json" 2>&1 | grep -aE "ms |rror|not run" | cut -c1-160
        ;;
    # 16,384 tokens, by the kernels alone.
    large)
        timeout 75 "$python" -m diffprune_lab.studies.selection --device cuda --size large --methods mmtok,$greedy \
            --seconds 50 --commit "$commit" --out "$out/selection_large.json" 2>&1 | tail -n 20
        ;;
    *) echo "there is no part $1" >&2; return 2 ;;
    esac
}

[ $# -gt 0 ] || set -- times ttft large
for part in "$@"; do
    run_part "$part"
    echo "== $part ended after $SECONDS s"
done
