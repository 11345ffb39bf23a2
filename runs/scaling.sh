#!/usr/bin/env bash
# Three sizes of one native-resolution model, scenes-qwen-s, -m and -l: trains them from scratch on one GPU, all side by
# side, then a scorer for each, and measures what is left of them at five pruning rates.
#
#   runs/scaling.sh train MINUTES INIT OUT ROUND
#   runs/scaling.sh probe WEIGHTS OUT COMMIT
#
#   runs/scaling.sh train 9 -          out/first  0     towers first, then the language models on top of them
#   runs/scaling.sh train 9 out/first  out/second 1     language models again, with other scenes
#   runs/scaling.sh probe out/second out/results abc1234
#   SIZE=tiny runs/scaling.sh train 1 - out/tiny 0      the same way on a CPU, in two minutes; so does probe
#
# INIT, OUT and WEIGHTS of the trainings hold the folders s/, m/ and l/, each with its weights in files under 16 MiB and
# log.jsonl; OUT/towers.tgz has the logs of the towers. `train` with STAGE=tower trains the towers alone, or goes on with
# those in INIT.
# What is under way lies in WORK (out/scaling). A process that fails does not stop the others.
# Settings: SIZES ("s m l"), STAGE, TOWER_SHARE of MINUTES, OPTIONS of every training, WORKERS; of `probe` SEEDS, STEPS,
# QUESTIONS, JOBS at a time, SECONDS_LEFT for all, GROUPS_ASKED (methods without training, a group to a process);
# OUT/parts.tgz has what was answered, and a `probe` that finds it goes on from there. MPS=0 keeps processes from sharing
# the GPU at the same time.
set -uo pipefail

what=$1
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
work=${WORK:-out/scaling}
export PYTHONPATH=$here/src PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=${TF32:-1}
: "${SIZES:=s m l}" "${OPTIONS:=}" "${MPS:=1}"
declare -A tower_batch=([s]=192 [m]=128 [l]=96) language_batch=([s]=192 [m]=160 [l]=128) workers=([s]=5 [m]=5 [l]=5)
tiny=()
if [ "${SIZE:-full}" = tiny ]; then
    tiny=(--steps 2 --batch 2 --workers 0 --device cpu --no-compile)
    : "${SEEDS:=42}" "${STEPS:=2}" "${QUESTIONS:=2}" "${JOBS:=2}" "${SECONDS_LEFT:=3600}"
fi
: "${SEEDS:=42 123 456}" "${STEPS:=300}" "${QUESTIONS:=500}" "${JOBS:=14}" "${SECONDS_LEFT:=560}"

running=()
finish() { [ ${#running[@]} -eq 0 ] || kill "${running[@]}" 2>/dev/null; }
trap 'finish; collect; exit 143' TERM INT

# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh

# --- training -------------------------------------------------------------------------------------------------------

stage() { # size, stage, minutes, folder to start from or -, folder to write
    local size=$1 stage=$2 minutes=$3 from=$4 to=$5 start=() batch
    [ "$from" = - ] || start=(--init "$from")
    batch=${language_batch[$size]}
    [ "$stage" = language ] || batch=${tower_batch[$size]}
    # shellcheck disable=SC2086  # options are words
    "$python" -m diffprune.scenes.qwen.pretrain --model "scenes-qwen-$size" --stage "$stage" --round "$round" \
        --minutes "$minutes" "${start[@]}" --out "$to" --batch "$batch" --workers "${WORKERS:-${workers[$size]}}" \
        ${tiny[@]+"${tiny[@]}"} $OPTIONS
}

train_size() { # size; runs as a process of its own
    local size=$1 from=- tower_minutes rest
    if [ "${STAGE:-}" = tower ]; then
        [ "$init" = - ] || from=$init/$size
        stage "$size" tower "$minutes" "$from" "$work/new/$size"
    elif [ "$init" = - ]; then
        tower_minutes=$(awk "BEGIN { print $minutes * ${TOWER_SHARE:-0.5} }")
        rest=$(awk "BEGIN { print $minutes - $tower_minutes }")
        stage "$size" tower "$tower_minutes" - "$work/tower/$size" &&
            stage "$size" language "$rest" "$work/tower/$size" "$work/new/$size"
    else
        stage "$size" language "$minutes" "$init/$size" "$work/new/$size"
    fi
}

collect() {
    [ "$what" = train ] || return 0
    local size from
    mkdir -p "$out"
    for size in $SIZES; do
        from=$work/new/$size
        [ -n "$(ls "$from"/model*.safetensors 2>/dev/null)" ] || from=$work/tower/$size # as far as it came
        [ -n "$(ls "$from"/model*.safetensors 2>/dev/null)" ] || continue
        mkdir -p "$out/$size"
        rm -f "$out/$size"/model*.safetensors
        cp "$from"/model*.safetensors "$from/log.jsonl" "$out/$size/"
    done
    [ ! -d "$work/tower" ] || tar -czf "$out/towers.tgz" -C "$work" --exclude='*.safetensors*' tower
}

train() {
    minutes=$1 init=$2 out=$3 round=$4
    rm -rf "$work/new" "$work/tower"
    mkdir -p "$work/logs"
    share_gpu
    local size failed=0
    for size in $SIZES; do
        train_size "$size" >"$work/logs/$size.log" 2>&1 &
        running+=($!)
    done
    for process in "${running[@]}"; do wait "$process" || failed=1; done
    running=()
    collect
    for size in $SIZES; do
        echo "== $size"
        grep -E "^(step|check=(full|objects|background)|deviation|Traceback|[A-Za-z.]*Error)" "$work/logs/$size.log" |
            tail -n "${LINES_TOLD:-6}" | cut -c1-420
    done
    du -sh "$out"
    return $failed
}

# --- scorers and answers --------------------------------------------------------------------------------------------

pack_size() { # size: the weights as a model that can be loaded
    "$python" -m diffprune.scenes.qwen.pretrain --model "scenes-qwen-$1" --stage package --init "$weights/$1" \
        --out "$work/models/scenes-qwen-$1" >"$work/logs/package-$1.log" 2>&1 ||
        echo "packing $1 failed: $(tail -n 1 "$work/logs/package-$1.log" | cut -c1-300)"
}

part() { # size, methods, seed
    local name=$1-${2//,/-}-$3 start=$SECONDS
    # shellcheck disable=SC2086  # options are words
    "$python" -m diffprune probe scaling --backbone "scenes-qwen-$1" --methods "$2" --seeds "$3" --steps "$STEPS" \
        --questions "$QUESTIONS" --weights "$work/models" --work "$work/parts" --out "$out" --commit "$commit" \
        $TINY_OPTIONS >"$work/logs/$name.log" 2>&1 ||
        echo "$name failed: $(tail -n 1 "$work/logs/$name.log" | cut -c1-300)"
    echo "$name $((SECONDS - start)) s" >>"$work/times.txt"
}

probe() {
    weights=$1 out=$2 commit=$3
    local size seed methods
    mkdir -p "$work/logs" "$work/models" "$out"
    [ ! -f "$out/parts.tgz" ] || [ -d "$work/parts" ] || tar -xzf "$out/parts.tgz" -C "$work" # goes on from there
    TINY_OPTIONS=
    [ "${SIZE:-full}" != tiny ] || TINY_OPTIONS="--device cpu --size tiny"
    for size in $SIZES; do pack_size "$size" & done
    wait
    share_gpu
    for size in l m s; do # the longest first
        case " $SIZES " in *" $size "*) ;; *) continue ;; esac
        for seed in $SEEDS; do echo "$size diffprune,random $seed"; done
        for methods in ${GROUPS_ASKED:-fastv holov divprune,visionzip hidden_norm,oracle}; do echo "$size $methods 0"; done
    done >"$work/parts.txt"
    export -f part
    export python work weights out commit STEPS QUESTIONS TINY_OPTIONS
    timeout -k 10 $((SECONDS_LEFT - SECONDS)) xargs -a "$work/parts.txt" -P "$JOBS" -L 1 bash -c 'part "$@"' _ &
    running=($!)
    wait "${running[0]}"
    running=()
    tar -czf "$out/parts.tgz" -C "$work" --exclude='*.safetensors' parts logs
    sort -k2 -n -r "$work/times.txt" 2>/dev/null | head -n 3
    ls -l "$out"
    [ -f "$out/scaling.json" ]
}

case $what in
train | probe)
    shift
    "$what" "$@"
    ;;
*)
    echo "there is no $what; choose train or probe" >&2
    exit 2
    ;;
esac
