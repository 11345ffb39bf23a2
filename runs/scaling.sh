#!/usr/bin/env bash
# Three sizes of one native-resolution model, scenes-qwen-s, -m and -l: trains them on one GPU, first the tower of all
# three, then their decoders side by side; then a scorer for each, and what is left of them at five pruning rates.
#
#   runs/scaling.sh train MINUTES INIT OUT ROUND
#   runs/scaling.sh probe WEIGHTS OUT COMMIT
#
#   runs/scaling.sh train 8.8 -         out/first  0    the tower, then the language models on top of it
#   runs/scaling.sh train 8.8 out/first out/second 1    language models again, with other scenes
#   runs/scaling.sh probe out/first out/results abc1234
#   SIZE=tiny runs/scaling.sh train 3 - out/tiny 0      the same way on a CPU, in two minutes; so does probe
#
# INIT, OUT and WEIGHTS of the trainings hold models.tar.xz in pieces of 15 MiB, with the folders tower/, s/, m/ and l/, and
# logs.tgz. OUT is filled every minute with what there is, for whoever is stopped in the middle; so is that of `probe`,
# whose parts.tgz has the answers: a `probe` that finds it goes on from there.
# What is under way lies in WORK (out/scaling). A process that fails does not stop the others, and a training that fails
# goes on without torch.compile.
# Settings: SIZES ("s m l"), TOWER_SHARE of MINUTES, OPTIONS of every training, TOWER_OPTIONS and LANGUAGE_OPTIONS; of
# `probe` SEEDS, JOBS at a time, SECONDS_LEFT for all, LEARNED (scorers to train; SIZE:METHOD of one size, METHOD@SEED of one
# seed), GROUPS_ASKED (methods without training, a group to a process). MPS=1 lets processes share the GPU at the same time, where it has a
# daemon for that.
set -uo pipefail

what=$1
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
work=${WORK:-out/scaling}
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
export HF_HUB_DISABLE_PROGRESS_BARS=1
# Answers without TF32: those of the full model, which every process gives, must be the same in all of them.
[ "$what" = probe ] || : "${TF32:=1}"
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=${TF32:-0}
: "${SIZES:=s m l}" "${OPTIONS:=}" "${TOWER_OPTIONS:=--batch 192 --workers 12}"
: "${LANGUAGE_OPTIONS:=--batch 128 --workers 4 --lr 3e-4}" "${KEPT_EVERY:=60}"
tiny=()
if [ "${SIZE:-full}" = tiny ]; then
    tiny=(--steps 2 --batch 2 --workers 0 --device cpu --no-compile)
    : "${SEEDS:=42}" "${JOBS:=2}" "${SECONDS_LEFT:=3600}" "${LEAST_SECONDS:=1}"
fi
: "${SEEDS:=42 123 456}" "${JOBS:=16}" "${SECONDS_LEFT:=530}" "${LEAST_SECONDS:=40}"
: "${LEARNED=diffprune,diffprune-diverse diffprune[recipe=paper]}"
: "${GROUPS_ASKED=random fastv gots mmtok holov,divprune visionzip,hidden_norm,oracle}"

# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh
# shellcheck source=runs/packed_models.sh
. runs/packed_models.sh

running=()
finish() { # at the end of time: what is there is kept
    trap - TERM INT
    [ ${#running[@]} -eq 0 ] || kill "${running[@]}" 2>/dev/null
    stop_filling
    [ "$what" = train ] && collect || keep_parts
    exit 143
}

# --- training -------------------------------------------------------------------------------------------------------

weights_in() { ls "$1"/model*.safetensors >/dev/null 2>&1; }

# In the background: size, stage, second of this script by which it ends, folder to start from or -, folder to write
stage() {
    local size=$1 stage=$2 until=$3 from=$4 to=$5 start more options=$LANGUAGE_OPTIONS
    [ "$stage" = language ] || options=$TOWER_OPTIONS
    trap 'kill "$!" 2>/dev/null; exit 143' TERM
    for more in "" --no-compile; do
        [ $((until - SECONDS)) -ge "$LEAST_SECONDS" ] || return 1
        ! weights_in "$to" || from=$to # as far as it came
        start=()
        [ "$from" = - ] || start=(--init "$from")
        # shellcheck disable=SC2086  # options are words
        "$python" -m diffprune_lab.pretrain.qwen --model "scenes-qwen-$size" --stage "$stage" --round "$round" \
            --minutes "$(awk "BEGIN { print ($until - $SECONDS) / 60 }")" "${start[@]}" --out "$to" $options \
            ${tiny[@]+"${tiny[@]}"} $OPTIONS $more &
        wait "$!" && return 0
    done
    return 1
}

collect() {
    local some=() size
    for size in $SIZES; do ! weights_in "$work/models/$size" || some+=("$size"); done
    if [ ${#some[@]} -lt "$(echo "$SIZES" | wc -w)" ] && weights_in "$work/models/tower"; then
        some+=(tower) # the others hold it too: alone it is needed until all of them have been saved once
    elif [ -f "$work/models/tower/log.jsonl" ]; then
        some+=(tower/log.jsonl)
    fi
    [ ${#some[@]} -gt 0 ] || return 0
    pack_models "$out" -C "$work/models" --exclude='*.part' "${some[@]}"
    tar -czf "$out/logs.tgz" -C "$work" logs
}

train() {
    minutes=$1 init=$2 out=$3 round=$4
    local size from failed=0 end
    end=$(awk "BEGIN { print int(60 * $minutes) }")
    rm -rf "$work/models" "$work/init"
    mkdir -p "$work/logs" "$work/models" "$out"
    trap finish TERM INT
    keep_filling "$KEPT_EVERY" collect
    if [ "$init" = - ]; then
        stage m tower "$(awk "BEGIN { print int($end * ${TOWER_SHARE:-0.37}) }")" - "$work/models/tower" \
            >"$work/logs/tower.log" 2>&1 &
        running=($!)
        wait "${running[0]}" || failed=1
        running=()
        weights_in "$work/models/tower" || { stop_filling; tail -n 3 "$work/logs/tower.log" >&2; return 1; }
    else
        unpack "$init" "$work/init" || { stop_filling; echo "there is no models.tar in $init" >&2; return 1; }
        [ ! -d "$work/init/tower" ] || cp -r "$work/init/tower" "$work/models/"
    fi
    share_gpu
    for size in $SIZES; do
        from=$work/init/$size
        weights_in "$from" || from=$work/models/tower
        stage "$size" language "$end" "$from" "$work/models/$size" >"$work/logs/$size.log" 2>&1 &
        running+=($!)
    done
    for process in "${running[@]}"; do wait "$process" || failed=1; done
    running=()
    stop_filling
    collect
    for size in tower $SIZES; do
        [ -f "$work/logs/$size.log" ] || continue
        echo "== $size"
        grep -hE "^(step|told|check=(full|objects|background)|deviation|Traceback|[A-Za-z.]*Error)" "$work/logs/$size.log" |
            tail -n "${LINES_TOLD:-5}" | cut -c1-420
    done
    ls -l "$out"
    return $failed
}

# --- scorers and answers --------------------------------------------------------------------------------------------

pack_size() { # size: the weights as a model that can be loaded
    local logs=()
    [ ! -f "$work/weights/tower/log.jsonl" ] || logs=(--logs "$work/weights/tower")
    "$python" -m diffprune_lab.pretrain.qwen --model "scenes-qwen-$1" --stage package --init "$work/weights/$1" \
        "${logs[@]}" --out "$work/packages/scenes-qwen-$1" >"$work/logs/package-$1.log" 2>&1 ||
        echo "packing $1 failed: $(tail -n 1 "$work/logs/package-$1.log" | cut -c1-300)"
}

part() { # size, methods, seed
    local name=$1-${2//,/-}-$3 start=$SECONDS
    # shellcheck disable=SC2086  # options are words
    "$python" -m diffprune_lab probe scaling --backbone "scenes-qwen-$1" --methods "$2" --seeds "$3" \
        --weights "$work/packages" --work "$work/parts" --out "$out" --commit "$commit" \
        --minutes "$(awk "BEGIN { print ($ends - $(date +%s)) / 60 }")" $TINY_OPTIONS \
        >"$work/logs/$name.log" 2>&1 || echo "$name failed: $(tail -n 1 "$work/logs/$name.log" | cut -c1-300)"
    echo "$name $((SECONDS - start)) s" >>"$work/times.txt"
}

each_size() { # methods, seeds: a part for each seed and size, the longest first
    local size seed sizes=$SIZES methods=$1
    case $methods in [sml]:*) sizes=${methods%%:*} methods=${methods#*:} ;; esac
    for size in l m s; do
        case " $SIZES " in *" $size "*) ;; *) continue ;; esac
        case " $sizes " in *" $size "*) for seed in $2; do echo "$size $methods $seed"; done ;; esac
    done
}

keep_parts() {
    [ -d "$work/parts" ] || return 0
    tar -czf "$work/parts.tgz" -C "$work" --exclude=scorers --exclude='*.part' parts logs &&
        mv "$work/parts.tgz" "$out/parts.tgz"
}

probe() {
    weights=$1 out=$2 commit=$3
    local size methods
    mkdir -p "$work/logs" "$work/packages" "$out"
    unpack "$weights" "$work/weights" || { echo "there is no models.tar in $weights" >&2; return 1; }
    [ ! -f "$out/parts.tgz" ] || [ -d "$work/parts" ] || tar -xzf "$out/parts.tgz" -C "$work" # goes on from there
    TINY_OPTIONS=
    [ "${SIZE:-full}" != tiny ] || TINY_OPTIONS="--device cpu --size tiny"
    for size in $SIZES; do pack_size "$size" & done
    wait
    share_gpu
    trap finish TERM INT
    keep_filling "$KEPT_EVERY" keep_parts
    set -f # brackets in a method's name are no pattern
    for methods in $LEARNED; do each_size "${methods%@*}" "$(case $methods in *@*) echo "${methods#*@}" ;; *) echo "$SEEDS" ;; esac)"; done >"$work/parts.txt"
    for methods in $GROUPS_ASKED; do each_size "$methods" "${SEEDS// /,}"; done >>"$work/parts.txt"
    set +f
    export -f part
    ends=$(($(date +%s) + $(left) - 20)) # what would end later is not begun
    export python work out commit TINY_OPTIONS ends
    timeout -k 10 $((SECONDS_LEFT - SECONDS)) xargs -a "$work/parts.txt" -P "$JOBS" -L 1 bash -c 'part "$@"' _ &
    running=($!)
    wait "${running[0]}"
    running=()
    stop_filling
    keep_parts
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
