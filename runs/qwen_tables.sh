#!/usr/bin/env bash
# Every table of the scenes-qwen models: trains the three sizes and a scorer of each for each of three seeds, then writes
# scaling, scenes_downscale, scenes_positions and batched_eval. Resumable: a stage that is run again does
# what is missing, and within a study no question twice.
#
#   runs/qwen_tables.sh STAGE OUT COMMIT          STAGE: models | scorers | probe | tables | all
#
# On one GPU with 16 cores and ten minutes a command, four calls on one machine, which then keeps WORK between them:
#   MPS=1 runs/qwen_tables.sh models  OUT COMMIT   9.1 minutes (MINUTES=8.9 of training): the tower, then s, m and l side by side
#   MPS=1 runs/qwen_tables.sh scorers OUT COMMIT   all sizes and seeds, one each from STARTS instead, STUDIED by groups
#   MPS=1 runs/qwen_tables.sh probe   OUT COMMIT   9 minutes at most (SECONDS_LEFT): what is left at six budgets
#   MPS=1 runs/qwen_tables.sh tables  OUT COMMIT   6.5 minutes (SECONDS_LEFT): downscale, positions, batches
#   SIZE=tiny runs/qwen_tables.sh all out/tiny abc1234     the same way with one size on a CPU; measures nothing
# For downscale, positions and batches alone one size is enough, without the probe:
#   SIZES=m MINUTES=5.6 TOWER_SHARE=0.56 runs/qwen_tables.sh models OUT COMMIT, then scorers, then tables
#
# What is under way lies in WORK (out/qwen). OUT gets what the next stage needs elsewhere: models.tar.xz in pieces of
# 15 MiB (bfloat16, below 50 MB in all), scorers.tgz, parts.tgz with the answers of the probe,
# tables.tgz with those of the tables; FROM=FOLDER of an earlier OUT, where WORK is empty, goes on from there.
# Settings: MINUTES, SIZES ("s m l"), STUDIED (m: the size of downscale and positions), SEEDS, STARTS, PRECISION, LEARNED (of the
# probe; default: both choices, those of STARTS, and scorers of STUDIED that look at merged groups),
# LLAVA_PRUNERS (scorers of scenes-llava, comma-separated), NEXT (folder of scenes-llava-next, runs/scenes_next.sh, for
# downscale), QUESTIONS of the tables, KEEP of the positions, BATCHED_QUESTIONS, EVAL_BATCH, SECONDS_LEFT.
set -uo pipefail

stage=$1 out=$2 commit=$3
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
work=${WORK:-out/qwen}
if [ "${SIZE:-full}" = tiny ]; then
    device=cpu
    : "${MINUTES:=3}" "${SIZES:=s}" "${STUDIED:=s}" "${SEEDS:=42}" "${LLAVA:=scenes-nano}" "${LLAVA_PRUNERS=none}"
    : "${STARTS=0.25}" "${EXTRA:=optim.steps=1 optim.batch_size=2 data.validation=2}" "${PRECISION:=float32}" "${GROUPS_ASKED:=random}" "${QUESTIONS:=1}" "${BATCHED_QUESTIONS:=1}" "${EVAL_BATCH:=16}"
    : "${METHODS:=random,divprune}" "${SECONDS_LEFT:=3600}"
    export GROUPS_ASKED
else
    device=${DEVICE:-cuda}
fi
: "${MINUTES:=8.9}" "${SIZES:=s m l}" "${STUDIED:=m}" "${SEEDS:=42 123 456}" "${LLAVA:=scenes-llava}"
: "${LLAVA_PRUNERS=scenes-llava-diffprune}" "${QUESTIONS:=200}" "${STARTS=0.25}" "${PRECISION:=bfloat16}"
: "${KEEP:=0.2222,0.1111,0.0556}" "${BATCHED_QUESTIONS:=4}" "${EVAL_BATCH:=256}" "${METHODS:=}" "${NEXT:=}"
if [ -z "${LEARNED:-}" ]; then
    LEARNED="diffprune,diffprune-diverse $STUDIED:diffprune[groups=merged]"
    for start in $STARTS; do LEARNED+=" diffprune[tau.drawn=false;tau.start=$start]@${SEEDS%% *}"; done
fi
scaling=$work/scaling # of runs/scaling.sh
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
mkdir -p "$work"/{logs,tables,jobs,models} "$out"
# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh
# shellcheck source=runs/packed_models.sh
. runs/packed_models.sh
trap 'stop_pool; stop_filling; exit 143' TERM INT

go_on() { # with what an earlier OUT holds
    [ -n "${FROM:-}" ] || return 0
    ls "$work/models"/models.tar* >/dev/null 2>&1 || cp "$FROM"/models.tar* "$work/models/" || exit 1
    [ -d "$scaling/parts/scorers" ] || [ ! -f "$FROM/scorers.tgz.00" ] || { mkdir -p "$scaling" && cat "$FROM"/scorers.tgz.[0-9]* | tar -xz -C "$scaling"; }
    [ -n "$(ls -A "$work/tables")" ] || [ ! -f "$FROM/tables.tgz" ] || tar -xzf "$FROM/tables.tgz" -C "$work"
    [ -f "$out/parts.tgz" ] || [ ! -f "$FROM/parts.tgz" ] || cp "$FROM/parts.tgz" "$out/"
}

models() {
    if ! ls "$work/models"/models.tar* >/dev/null 2>&1; then
        WORK=$scaling SIZES=$SIZES runs/scaling.sh train "$MINUTES" - "$work/models" 0 || echo "a training did not end well"
    fi
    cp "$work/models"/* "$out/"
}

probe() { # what scaling.sh has answered it does not answer again
    WORK=$scaling SIZES=$SIZES SEEDS=$SEEDS LEARNED=$LEARNED SECONDS_LEFT=${SECONDS_LEFT:-540} \
        runs/scaling.sh probe "$work/models" "$out" "$commit"
}

train() { # size, name, seeds with commas, overrides: all seeds in step with each other
    local size=$1 name=$2 seeds=$3
    shift 3
    # shellcheck disable=SC2086  # overrides are words
    echo "scorers-$size-$name" "$(left)" "$python" -m diffprune_lab.studies.in_step --config lab/configs/scenes_qwen/diffprune_any.yaml \
        --seeds "$seeds" --out "$scaling/parts/scorers/scenes-qwen-$size-$name-{seed}" \
        "backbone.weights=$scaling/packages/scenes-qwen-$size" "backbone.dtype=$PRECISION" "optim.precision=$PRECISION" \
        saving.tensorboard=false validation.every=0.34 "$@" ${EXTRA:-}
}

scorers() {
    : "${SECONDS_LEFT:=540}"
    local size start
    package || return 1
    for size in l m s; do # the longest first
        case " $SIZES " in *" $size "*) ;; *) continue ;; esac
        train "$size" diffprune "${SEEDS// /,}"
        for start in $STARTS; do
            train "$size" "diffprune[tau.drawn=false;tau.start=$start]" "${SEEDS%% *}" tau.drawn=false "tau.start=$start"
        done
        [ "$size" != "$STUDIED" ] || train "$size" "diffprune[groups=merged]" "${SEEDS// /,}" method.groups=merged
    done >"$work/jobs/scorers.txt"
    share_gpu
    pool 16 "$work/jobs/scorers.txt" 15
    pieces "$out/scorers.tgz" -C "$scaling" --exclude 'checkpoint*' parts/scorers
    cat "$work/status.txt"
}

study() { # name of the study, models NAME=FOLDER=PRUNERS
    local name=$1 one options=()
    shift
    for one in "$@"; do
        options+=(--model "${one%=*}")
        [ "${one##*=}" = none ] || options+=(--pruner "${one%%=*}=${one##*=}")
    done
    [ "$name" = positions ] && options+=(--keep "$KEEP") || options+=(${METHODS:+--methods "$METHODS"})
    echo "$python" -m "diffprune_lab.studies.$name" "${options[@]}" --questions "$QUESTIONS" --batch-size "$EVAL_BATCH" \
        --device "$device" --commit "$commit" --out "$work/tables/scenes_$name.json"
}

keep_tables() { tar -czf "$work/packed.tgz" -C "$work" tables logs && mv "$work/packed.tgz" "$out/tables.tgz"; }

tables() {
    : "${SECONDS_LEFT:=390}"
    local qwen=scenes-qwen-$STUDIED folders=() seed of_qwen of_llava next=()
    package || return 1
    for seed in $SEEDS; do
        [ ! -f "$scaling/parts/scorers/$qwen-diffprune-$seed/model.safetensors" ] || folders+=("$scaling/parts/scorers/$qwen-diffprune-$seed")
    done
    of_qwen=$qwen=$scaling/packages/$qwen=$(IFS=,; echo "${folders[*]:-none}") of_llava=$LLAVA=$LLAVA=$LLAVA_PRUNERS
    [ -z "$NEXT" ] || next=("scenes-llava-next=$NEXT=none")
    # Alone on the GPU, for it is timed: answers one by one and in batches.
    [ -f "$work/tables/batched_eval.json" ] || echo batched "$(left)" "$python" runs/batched_eval.py --model "$LLAVA" \
        --questions "$BATCHED_QUESTIONS" --device "$device" --commit "$commit" --out "$work/tables/batched_eval.json" \
        >"$work/jobs/batched.txt"
    [ -f "$work/tables/batched_eval.json" ] || pool 1 "$work/jobs/batched.txt" 200
    share_gpu
    # A process for each study, side by side; one that is started again keeps the answers it has, in whatever order models load.
    {
        echo downscale "$(left)" "$(study downscale "$of_qwen" ${next[@]+"${next[@]}"})"
        echo positions "$(left)" "$(study positions "$of_qwen" "$of_llava")"
    } >"$work/jobs/tables.txt"
    keep_filling 30 keep_tables
    pool 2 "$work/jobs/tables.txt" 10
    stop_filling
    keep_tables
    for name in scenes_downscale scenes_positions batched_eval; do
        if [ -f "$work/tables/$name.json" ]; then cp "$work/tables/$name.json" "$out/"; else echo "there is no $name"; fi
    done
    ls -l "$out"
    [ -f "$out/scenes_downscale.json" ] && [ -f "$out/scenes_positions.json" ]
}

package() { # each size as a model that can be loaded, where it is not there yet
    local size missing=()
    for size in $SIZES; do [ -f "$scaling/packages/scenes-qwen-$size/config.json" ] || missing+=("$size"); done
    [ ${#missing[@]} -gt 0 ] || return 0
    rm -rf "$work/weights" && mkdir -p "$work/weights" "$scaling/packages"
    unpack "$work/models" "$work/weights" || { echo "there is no models.tar in $work/models" >&2; return 1; }
    for size in "${missing[@]}"; do
        "$python" -m diffprune_lab.pretrain.qwen --model "scenes-qwen-$size" --stage package --init "$work/weights/$size" \
            --out "$scaling/packages/scenes-qwen-$size" >"$work/logs/package.log" 2>&1 || { tail -n 1 "$work/logs/package.log" >&2; return 1; }
    done
}

go_on
case $stage in
models | scorers | probe | tables) "$stage" ;;
all) models && scorers && probe && tables ;;
*) echo "there is no stage $stage; choose models, scorers, probe, tables or all" >&2; exit 2 ;;
esac
