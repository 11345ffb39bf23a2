#!/usr/bin/env bash
# Every test that needs a GPU, in parts side by side.
#
#   runs/gpu_tests.sh OUT [SHARDS [tests/fast ...]]
#
# OUT/gpu_tests.txt gets what failed and the counts; the exit code is 0 where all passed. What is under way lies in
# WORK (out/gpu_tests). SECONDS_LEFT ends it (540 where nothing else is said).
set -uo pipefail

out=$1 shards=${2:-8} wanted=("${@:3}")
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=${WORK:-out/gpu_tests}
export PYTHONPATH=$PWD/src:$PWD/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MPLBACKEND=Agg
: "${SECONDS_LEFT:=540}"
# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh
trap 'stop_pool; exit 143' TERM INT
rm -rf "$work"
mkdir -p "$work" "$out"

# Without the options of pyproject.toml: a GPU image may lack beartype, which checks shapes, and what other tests import.
pytest="$python -m pytest -o addopts= --import-mode=importlib -q -m gpu"
$pytest --collect-only --continue-on-collection-errors ${wanted[@]+"${wanted[@]}"} >"$work/collect.log" 2>&1
grep :: "$work/collect.log" | grep -v '^ERROR' >"$work/all.txt"
[ -s "$work/all.txt" ] || { echo "no test was collected: $(tail -n 1 "$work/collect.log")" >&2; exit 1; }
tests=$(wc -l <"$work/all.txt")
shards=$((shards < tests ? shards : tests)) # a part without a test would run all of them
for ((shard = 0; shard < shards; shard++)); do
    awk -v shard="$shard" -v shards="$shards" 'NR % shards == shard' "$work/all.txt" >"$work/$shard.txt"
    echo "part-$shard $SECONDS_LEFT $pytest @$work/$shard.txt"
done >"$work/jobs.txt"
pool "$shards" "$work/jobs.txt" 5
{
    grep -hE '^(FAILED|ERROR)' "$work"/logs/part-*.log
    grep -hE '^[0-9].* in [0-9.]+s' "$work"/logs/part-*.log
    echo "$tests collected, $(grep -c 'code 0' "$work/status.txt") of $shards parts without a failure, $SECONDS s"
} | tee "$out/gpu_tests.txt"
[ "$(grep -c 'code 0' "$work/status.txt")" = "$shards" ]
