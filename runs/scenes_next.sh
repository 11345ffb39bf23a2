#!/usr/bin/env bash
# scenes-llava-next, the reference model of high resolution (2,880 visual tokens): tunes it on one GPU, then trains its
# scorers, answers the ten tasks with them and with other methods, and writes scenes_next.
#
#   runs/scenes_next.sh train MINUTES INIT OUT ROUND
#   runs/scenes_next.sh study WEIGHTS OUT COMMIT
#
#   runs/scenes_next.sh train 6 - out/next 0                   from scenes-llava; OUT gets 9 MB of weights and a log
#   runs/scenes_next.sh train 6 out/next out/next-1 1          goes on with it, with other scenes
#   runs/scenes_next.sh study out/next-1 out/results abc1234   one GPU, 16 cores, under ten minutes
#   SIZE=tiny runs/scenes_next.sh train 1 - out/tiny 0         the same way on a CPU with scenes-nano; so does study
#
# What `study` trains and answers lies in WORK (out/next-study), with a log for each process and what became of it in
# WORK/status.txt. A process that fails, or takes too long, does not stop the others: OUT gets what there is, and
# OUT/next_answers.tgz has the answers, so that the table can be joined again anywhere.
# Settings: OPTIONS of the tuning; STEPS, BATCH, SEEDS, KEEP, QUESTIONS, EXTRA (overrides of every scorer), FREE (methods
# without training; commas join those of one process), STAGES (train eval join pack), JOBS, EVAL_JOBS, SECONDS_LEFT;
# each process of answers holds the features of all its pictures, 2.2 MB each, on the GPU, so EVAL_JOBS is what memory is
# spent on; MPS=1 lets processes share the GPU at the same time, where it has a daemon for that.
set -uo pipefail

what=$1
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
export PYTHONPATH=$here/src PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=${TF32:-1} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1

base=() tuning=() device=()
if [ "${SIZE:-full}" = tiny ]; then
    base=(--base src/diffprune/assets/scenes-nano) device=(--device cpu)
    tuning=(--steps 2 --batch 2 --workers 0 --device cpu --no-compile)
    : "${STEPS:=2}" "${BATCH:=2}" "${HELD_OUT:=2}" "${SEEDS:=42}" "${KEEP:=160,80,40}" "${RANGE:=[10,200]}"
    : "${QUESTIONS:=1}" "${JOBS:=2}" "${EVAL_JOBS:=2}" "${EVAL_BATCH:=16}" "${SECONDS_LEFT:=3600}"
    : "${TRAIN_LIMIT:=300}" "${EVAL_LIMIT:=600}"
fi
: "${STEPS:=200}" "${BATCH:=16}" "${HELD_OUT:=64}" "${SEEDS:=42 123 456}" "${KEEP:=640,320,160}" "${RANGE:=[40,800]}"
: "${QUESTIONS:=200}" "${JOBS:=4}" "${EVAL_JOBS:=8}" "${EVAL_BATCH:=96}" "${SECONDS_LEFT:=570}"
: "${TRAIN_LIMIT:=240}" "${EVAL_LIMIT:=290}" "${KEEP_SECONDS:=25}"
: "${FREE:=random oracle,uniform_grid divprune,cls_attention visionzip,feature_norm holov,prunesid hidden_norm,fastv}"

# --- the model ------------------------------------------------------------------------------------------------------

tune() {
    local minutes=$1 init=$2 out=$3 round=$4 start=()
    [ "$init" = - ] || start=(--init "$init")
    # shellcheck disable=SC2086  # options are words
    exec "$python" -m diffprune.scenes.next train --minutes "$minutes" "${start[@]}" --out "$out" --round "$round" \
        "${base[@]}" "${tuning[@]}" ${OPTIONS:-}
}

# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh
trap 'stop_pool; exit 143' TERM INT

# --- scorers and answers --------------------------------------------------------------------------------------------

train() { # config, name, seed
    # shellcheck disable=SC2086  # overrides are words
    echo "train-$2-$3" "$TRAIN_LIMIT" "$python" -m diffprune train --json \
        --config "configs/scenes_llava_next/$1.yaml" --out "$work/train/$2-$3" "backbone.weights=$work/model" "seed=$3" \
        "budget.range=$RANGE" "optim.steps=$STEPS" "optim.batch_size=$BATCH" "data.validation=$HELD_OUT" \
        validation.every=0.5 saving.tensorboard=false ${EXTRA:-}
}

evaluate() { # name, further options of `diffprune eval`
    local name=$1
    shift
    echo "eval-$name" "$EVAL_LIMIT" "$python" -m diffprune eval --questions "$QUESTIONS" --keep "$KEEP" \
        --batch-size "$EVAL_BATCH" "${device[@]}" --commit "$commit" --out "$work/eval/$name.json" "$@"
}

trainings() {
    local seed
    for seed in $SEEDS; do train diffprune_bridge_any diffprune "$seed"; done
    train gumbel_ste_any gumbel_ste "${SEEDS%% *}"
}

evaluations() {
    local names folder
    for folder in "$work"/train/*; do
        [ ! -f "$folder/model.safetensors" ] || evaluate "$(basename "$folder")" --pruner "$folder"
    done
    for names in $FREE; do evaluate "free-${names//,/+}" --model "$work/model" --methods "$names"; done
}

table() {
    local file files=()
    for file in "$work"/eval/*.json; do
        case $file in *.answers.json) ;; *) [ -f "$file" ] && files+=("$file") ;; esac
    done
    [ ${#files[@]} -gt 0 ] || { echo "nothing was answered"; return 0; }
    set -- "$python" -m diffprune.evaluate.join "${files[@]}" --out "$work/results/scenes_next.json" \
        --command "runs/scenes_next.sh study WEIGHTS OUT COMMIT" \
        --notes "scenes-llava-next, 2,880 visual tokens of a 384 px picture; $STEPS steps of $BATCH captions for each scorer"
    # Where a method is missing: what there is.
    "$@" --versus diffprune --methods 'diffprune,gumbel_ste,random,*' || "$@" --versus diffprune || "$@" || return 0
    cp "$work"/results/scenes_next.json "$out/"
}

study() {
    weights=$1 out=$2 commit=$3 work=${WORK:-out/next-study}
    mkdir -p "$work"/{train,logs,eval,jobs} "$out"
    "$python" -m diffprune.scenes.next package --init "$weights" --out "$work/model" "${base[@]}" \
        >"$work/logs/package.log" 2>&1 || { tail -n 1 "$work/logs/package.log" >&2; exit 1; }
    share_gpu
    for stage in ${STAGES:-train eval join pack}; do
        echo "== $stage, $(left) s left"
        case $stage in
        train) trainings >"$work/jobs/train.txt" && pool "$JOBS" "$work/jobs/train.txt" $((EVAL_LIMIT + KEEP_SECONDS)) ;;
        eval) evaluations >"$work/jobs/eval.txt" && pool "$EVAL_JOBS" "$work/jobs/eval.txt" "$KEEP_SECONDS" ;;
        join) table ;;
        pack)
            cp "$work/status.txt" "$out/next_status.txt" 2>/dev/null
            tar -czf "$out/next_answers.tgz" -C "$work" eval logs
            tar -czf "$out/next_scorers.tgz" -C "$work" --exclude 'checkpoint*' train
            ls -l "$out"
            ;;
        *) echo "there is no stage $stage; choose from train, eval, join and pack" >&2 && exit 2 ;;
        esac
    done
    echo "== done after $SECONDS s: $(grep -c 'code 0' "$work/status.txt") processes ended well, $(grep -vc 'code 0' "$work/status.txt") did not"
}

case $what in
train) tune "$2" "$3" "$4" "$5" ;;
study) study "$2" "$3" "$4" ;;
*) echo "there is no $what; choose train or study" >&2 && exit 2 ;;
esac
