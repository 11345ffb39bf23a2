#!/usr/bin/env bash
# One config for every model: trains scorers of the models that ship by it, and one each from other temperatures, answers
# at 11.1 % of the tokens, and writes recipe.json. The models that do not ship have theirs in runs/qwen_tables.sh and
# runs/scenes_next.sh.
#
#   runs/recipe.sh OUT COMMIT
#
#   MPS=1 runs/recipe.sh OUT abc1234                  one GPU with 16 cores
#   SIZE=tiny runs/recipe.sh out/tiny abc1234         the same way with scenes-nano on a CPU; measures nothing
#
# What is under way lies in WORK (out/recipe), with a log for each process and what became of it in WORK/status.txt; a run
# that is started again does what is missing. OUT gets recipe.json, whatever is missing, and recipe.tgz with the answers.
# Settings: MODELS, SEEDS, STARTS (temperatures) with START_SEEDS, STEPS, PRECISION, QUESTIONS, EVAL_SECONDS, SECONDS_LEFT.
set -uo pipefail

out=$1 commit=$2
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
work=${WORK:-out/recipe}
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
own=()
if [ "${SIZE:-full}" = tiny ]; then
    device=cpu own=(optim.batch_size=2 data.validation=2)
    : "${MODELS:=scenes-nano}" "${SEEDS:=42}" "${STARTS=2}" "${STEPS:=2}" "${PRECISION:=float32}" "${QUESTIONS:=1}" "${SECONDS_LEFT:=3600}"
else
    device=${DEVICE:-cuda}
fi
: "${MODELS:=scarce-llava scenes-llava scenes-nano}" "${SEEDS:=42 123 456}" "${STARTS=2 0.25}" "${START_SEEDS:=${SEEDS%% *}}"
: "${STEPS:=1200}" "${PRECISION:=bfloat16}" "${QUESTIONS:=300}" "${EVAL_SECONDS:=150}" "${SECONDS_LEFT:=570}"
mkdir -p "$work"/{train,logs,jobs} "$out"
# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh
trap 'stop_pool; exit 143' TERM INT

train() { # model, name, seeds, overrides: seeds in step with each other
    local model=$1 name=$2 seeds=$3
    shift 3
    echo "train-$model-$name" "$SECONDS_LEFT" "$python" -m diffprune_lab.studies.in_step \
        --config "lab/configs/${model//-/_}/diffprune_any.yaml" --seeds "${seeds// /,}" --out "$work/train/$model-$name-{seed}" \
        "optim.steps=$STEPS" "optim.precision=$PRECISION" "backbone.dtype=$PRECISION" validation.every=0.34 saving.tensorboard=false \
        ${own[@]+"${own[@]}"} "$@"
}

for model in $MODELS; do
    train "$model" recipe "$SEEDS"
    for start in $STARTS; do train "$model" "from$start" "$START_SEEDS" tau.drawn=false "tau.start=$start"; done
done >"$work/jobs/train.txt"
share_gpu
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
pool 16 "$work/jobs/train.txt" "$EVAL_SECONDS"

export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0 # answers
asked=()
for model in $MODELS; do
    found=
    for folder in "$work/train/$model"-*; do
        [ -f "$folder/model.safetensors" ] || continue
        name=$(basename "${folder%-*}") label=
        case $name in *-from*) label="diffprune[tau.drawn=false;tau.start=${name##*-from}]=" ;; esac
        found+=${found:+,}$label$folder
    done
    asked+=(--model "$model=$model")
    [ -z "$found" ] || asked+=(--pruner "$model=$found")
done
# Answers of other scorers than these are no part of this table.
tables=$work/tables/$(echo "${asked[@]}" | cksum | cut -d " " -f 1)
mkdir -p "$tables"
[ "$(left)" -lt 15 ] || timeout $(($(left) - 10)) "$python" -m diffprune_lab.studies.recipe "${asked[@]}" --questions "$QUESTIONS" --batch-size 256 \
    --device "$device" --commit "$commit" --out "$tables/recipe.json" 2>&1 | tee "$work/logs/answers.log" | tail -n 8
tar -czf "$out/recipe.tgz" -C "$work" "${tables#"$work/"}" logs status.txt
cat "$work/status.txt"
cp "$tables/recipe.json" "$out/"
