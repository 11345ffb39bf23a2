#!/usr/bin/env bash
# scenes-llava-next, the reference model of high resolution (2,880 visual tokens): tunes it on one GPU, then trains its
# scorers, answers the ten tasks with them and with other methods, and writes scenes_next.
#
#   runs/scenes_next.sh all MINUTES OUT COMMIT
#   runs/scenes_next.sh train MINUTES INIT OUT ROUND
#   runs/scenes_next.sh study WEIGHTS OUT COMMIT
#
#   STAGES=train runs/scenes_next.sh all 3.4 OUT abc1234       tunes, then trains scorers, as far as ten minutes reach
#   runs/scenes_next.sh study - OUT abc1234                    goes on with what WORK holds, on the same machine
#   runs/scenes_next.sh train 6 - out/next 0                   from scenes-llava; OUT gets 9 MB of weights and a log
#   runs/scenes_next.sh train 6 out/next out/next-1 1          goes on with it, with other scenes
#   runs/scenes_next.sh study out/next-1 out/results abc1234   with those weights
#   SIZE=tiny runs/scenes_next.sh all 1 out/tiny abc1234       the same way on a CPU with scenes-nano
#
# What is trained and answered lies in WORK (out/next-study), with a log for each process and what became of it in
# WORK/status.txt. A process that fails, or takes too long, does not stop the others, and a tuning that fails goes on
# without torch.compile. OUT gets the weights when they are there, the scorers after their training, and what was
# answered every half minute: next_answers.tgz, from which the table can be joined again anywhere. `study` goes on with
# what WORK holds, or else with next_scorers.tgz and next_answers.tgz in OUT, and does the rest; a training that was cut off
# goes on from its last step where WORK still holds it. WEIGHTS are then - : the model lies in WORK.
# Scorers are trained by the one config of all models, ours also with attention across tiles (diffprune-joined).
# Settings: OPTIONS of the tuning; STEPS, BATCH, PRECISION, SEEDS, KEEP, QUESTIONS, EXTRA (overrides of every scorer), FREE
# (methods without training; commas join those of one process), STARTS (ours from these temperatures instead, one seed), STAGES (train eval join pack), JOBS, EVAL_JOBS, SECONDS_LEFT;
# each process of answers holds the features of all its pictures, 2.2 MB each, on the GPU, so EVAL_JOBS is what memory is
# spent on; MPS=1 lets processes share the GPU at the same time, where it has a daemon for that.
set -uo pipefail

what=$1
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=${TF32:-1} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1

base=() tuning=() device=()
if [ "${SIZE:-full}" = tiny ]; then
    base=(--base lab/diffprune_lab/assets/scenes-nano) device=(--device cpu)
    tuning=(--steps 2 --batch 2 --workers 0 --device cpu --no-compile)
    : "${STEPS:=2}" "${BATCH:=2}" "${HELD_OUT:=2}" "${SEEDS:=42}" "${KEEP:=160,80,40}" "${PRECISION:=float32}"
    : "${QUESTIONS:=1}" "${JOBS:=2}" "${EVAL_JOBS:=2}" "${EVAL_BATCH:=16}" "${SECONDS_LEFT:=3600}"
    : "${TRAIN_LIMIT:=300}" "${EVAL_LIMIT:=600}"
fi
: "${STEPS:=1200}" "${BATCH:=16}" "${HELD_OUT:=128}" "${SEEDS:=42 123 456}" "${KEEP:=640,320,160}" "${PRECISION:=bfloat16}"
: "${QUESTIONS:=100}" "${JOBS:=3}" "${EVAL_JOBS:=10}" "${EVAL_BATCH:=64}" "${SECONDS_LEFT:=540}"
: "${TRAIN_LIMIT:=560}" "${EVAL_LIMIT:=400}" "${KEEP_SECONDS:=20}" "${STARTS=}"
: "${FREE:=random gots mmtok oracle,uniform_grid divprune,cls_attention visionzip,feature_norm holov,prunesid hidden_norm,fastv}"

# --- the model ------------------------------------------------------------------------------------------------------

tune() {
    local init=$2 out=$3 round=$4 end more start=()
    end=$(awk "BEGIN { print int(60 * $1) }")
    [ "$init" = - ] || start=(--init "$init")
    for more in "" --no-compile; do
        [ $((end - SECONDS)) -ge 40 ] || break
        # shellcheck disable=SC2086  # options are words
        "$python" -m diffprune_lab.pretrain.next --stage language --minutes "$(awk "BEGIN { print ($end - $SECONDS) / 60 }")" \
            "${start[@]}" --out "$out" --round "$round" "${base[@]}" "${tuning[@]}" ${OPTIONS:-} $more && return 0
    done
    ls "$out"/model*.safetensors >/dev/null 2>&1 # as far as it came
}

# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh
# shellcheck source=runs/packed_models.sh
. runs/packed_models.sh
trap 'stop_pool; stop_filling; exit 143' TERM INT

# --- scorers and answers --------------------------------------------------------------------------------------------

train() { # name, seeds, overrides; seeds go in step with each other
    local name=$1 seed todo=()
    for seed in $2; do [ -f "$work/train/$name-$seed/model.safetensors" ] || todo+=("$seed"); done
    [ ${#todo[@]} -gt 0 ] || return 0 # are there
    shift 2
    # shellcheck disable=SC2086  # overrides are words
    echo "train-$name" "$TRAIN_LIMIT" "$python" -m diffprune_lab.studies.in_step \
        --config lab/configs/scenes_llava_next/diffprune_any.yaml --seeds "$(IFS=,; echo "${todo[*]}")" \
        --out "$work/train/$name-{seed}" "backbone.weights=$work/model" "backbone.dtype=$PRECISION" "optim.precision=$PRECISION" \
        "optim.steps=$STEPS" "optim.batch_size=$BATCH" "data.validation=$HELD_OUT" validation.every=0.34 \
        saving.tensorboard=false "$@" ${EXTRA:-}
}

evaluate() { # name, further options of `diffprune eval`
    local name=$1
    shift
    [ ! -f "$work/eval/$name.json" ] || return 0 # is there
    # Without TF32: the full model's answers, which every process gives, must be the same in all of them.
    echo "eval-$name" "$EVAL_LIMIT" env TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=${TF32:-0} \
        "$python" -m diffprune_lab eval --questions "$QUESTIONS" --keep "$KEEP" \
        --seeds 0,1 --batch-size "$EVAL_BATCH" "${device[@]}" --commit "$commit" --out "$work/eval/$name.json" "$@"
}

trainings() {
    local start
    train diffprune "$SEEDS"
    train diffprune-joined "$SEEDS" method.tiles=joined
    train gumbel_ste "${SEEDS%% *}" method.name=gumbel_ste
    for start in $STARTS; do train "diffprune-from$start" "${SEEDS%% *}" tau.drawn=false "tau.start=$start"; done
}

evaluations() {
    local name names folder
    for folder in "$work"/train/*; do
        [ -f "$folder/model.safetensors" ] || continue
        name=$(basename "$folder")
        case $name in
        diffprune-from*) names=${name%-*} && evaluate "$name" --pruner "diffprune[tau.drawn=false;tau.start=${names#*from}]=$folder" ;;
        diffprune-joined-*) evaluate "$name" --pruner "diffprune-joined=$folder" ;;
        diffprune-*) evaluate "$name" --pruner "$folder" --methods diffprune-diverse ;;
        *) evaluate "$name" --pruner "$folder" ;;
        esac
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
        --command "runs/scenes_next.sh all MINUTES OUT COMMIT" \
        --notes "scenes-llava-next, 2,880 visual tokens of a 384 px picture; $STEPS steps of $BATCH captions for each scorer"
    # Where a method is missing: what there is.
    "$@" --versus diffprune-diverse --methods 'diffprune-diverse,diffprune,diffprune-joined,gumbel_ste,random,*' || "$@" --versus diffprune || "$@" || return 0
    cp "$work/results/scenes_next.json" "$out/"
}

keep_scorers() { pieces "$out/next_scorers.tgz" -C "$work" --exclude 'checkpoint*' train; }
keep_answers() {
    touch "$work/status.txt"
    tar -czf "$work/packed.tgz" -C "$work" eval logs status.txt && mv "$work/packed.tgz" "$out/next_answers.tgz"
}

study() {
    weights=$1 out=$2 commit=$3 work=${WORK:-out/next-study}
    mkdir -p "$work"/{logs,jobs} "$out"
    [ -d "$work/train" ] || [ ! -f "$out/next_scorers.tgz.00" ] || cat "$out"/next_scorers.tgz.[0-9]* | tar -xz -C "$work"
    [ -d "$work/eval" ] || [ ! -f "$out/next_answers.tgz" ] || tar -xzf "$out/next_answers.tgz" -C "$work"
    mkdir -p "$work"/{train,eval}
    [ -f "$work/model/config.json" ] || "$python" -m diffprune_lab.pretrain.next --stage package --init "$weights" --out "$work/model" "${base[@]}" \
        >"$work/logs/package.log" 2>&1 || { tail -n 1 "$work/logs/package.log" >&2; exit 1; }
    share_gpu
    for stage in ${STAGES:-train eval join pack}; do
        echo "== $stage, $(left) s left"
        case $stage in
        train)
            trainings >"$work/jobs/train.txt"
            # Answers get what the trainings leave: what is cut off goes on in the next call.
            [ ! -s "$work/jobs/train.txt" ] || pool "$JOBS" "$work/jobs/train.txt" "$KEEP_SECONDS"
            keep_scorers
            ;;
        eval)
            evaluations >"$work/jobs/eval.txt"
            keep_filling 30 keep_answers
            [ ! -s "$work/jobs/eval.txt" ] || pool "$EVAL_JOBS" "$work/jobs/eval.txt" "$KEEP_SECONDS"
            stop_filling
            ;;
        join) table ;;
        pack)
            keep_answers
            ls -l "$out"
            ;;
        *) echo "there is no stage $stage; choose from train, eval, join and pack" >&2 && exit 2 ;;
        esac
    done
    echo "== done after $SECONDS s: $(grep -c 'code 0' "$work/status.txt") processes ended well, $(grep -vc 'code 0' "$work/status.txt") did not"
}

all() { # minutes, out, commit
    local work=${WORK:-out/next-study}
    tune "$1" - "$2" 0 || exit 1
    rm -rf "$work"/{model,train,eval,status.txt} "$2"/next_{scorers,answers}.tgz* # of other weights
    study "$2" "$2" "$3"
}

case $what in
all) all "$2" "$3" "$4" ;;
train) tune "$2" "$3" "$4" "$5" ;;
study) study "$2" "$3" "$4" ;;
*) echo "there is no $what; choose all, train or study" >&2 && exit 2 ;;
esac
