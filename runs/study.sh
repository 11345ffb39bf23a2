#!/usr/bin/env bash
# The study on a reference model: trains every scorer of the tables, answers all tasks with every method, and writes of its
# world main, methods, random, ablation, any_budget and throttled (scenes_main and so on; of the scarce world methods is
# the main table).
#
#   runs/study.sh STAGE OUT COMMIT          STAGE: train | eval | join | pack | all
#
#   runs/study.sh all out/results abc1234                      scenes-llava on one GPU with 16 cores
#   WORLD=scarce runs/study.sh all out/results abc1234         scarce-llava
#   SIZE=tiny runs/study.sh all out/tiny abc1234               the same way with scenes-nano on a CPU, in minutes
#   STAGES="eval join pack" ... all                            the stages that `all` goes through
#   WORLD_SEED=7 runs/study.sh all out/results abc1234         the same scorers asked about other scenes: what drops before
#                                                              the language model, scenes_main_world7.json; trains nothing
#
# What is trained and answered lies in WORK (out/study-scenes, out/study-scarce), with a log for each process and what became
# of it in WORK/status.txt. A process that fails, or takes too long, does not stop the others: OUT/tables.tgz has the
# tables of what there is, and OUT/answers.tgz (in pieces of 15 MiB, .00 and so on) the answers, so that tables can be joined
# again anywhere. A stage that is run again does what is missing, so a table too long for one call of ten minutes is made
# in several on one machine: STAGES=train, then STAGES="train eval", then all of them.
# Settings: STEPS, BATCH, QUESTIONS, KEEP, JOBS, EVAL_JOBS, SECONDS_LEFT and EVAL_SECONDS (of these), PRECISION; SCORERS
# (of our own, and Gumbel-STE) with SEEDS, ABLATIONS with FEW_SEEDS (-paper: by the paper's recipe), MANY and FEW (other
# learned methods) with SEEDS and FEW_SEEDS, FREE (methods without training; nothing: none, and the trained ones are
# compared among themselves, in rivals); THROTTLED (budgets at which ours is also answered as in training,
# ablations at the last of them; empty: none),
# OTHER_KEEP (empty: no table of any budget), EXTRA (overrides of every training), FROM (scorers.tgz
# of an earlier OUT, without .00, where WORK has no scorers: our own), ANSWERS (answers.tgz of earlier OUTs, without
# .00: what they hold is not asked again, and `join` takes it too, so that a table too long for one call is made in
# several that each train and answer a part; MIXED=1 where these were made at different commits); MPS=1 lets processes
# share the GPU at the same time, where it has a daemon for it; COMPILE=1 compiles the frozen decoder of our own trainings
# (5.8 instead of 8.4 ms of an H200's time a step and seed).
# SECONDS_LEFT is 570 where nothing else is said, for machines that end a command after ten minutes: take more.
set -uo pipefail

stage=$1 out=$2 commit=$3
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=${TF32:-1} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
export TORCHINDUCTOR_COMPILE_THREADS=1 # there are as many processes as cores

seed_of_world=${WORLD_SEED:-0} answers=eval named=
if [ "$seed_of_world" != 0 ]; then # the question is whether the main table holds there too
    answers=eval-world$seed_of_world named=_world$seed_of_world
    : "${STAGES:=eval join pack}" "${KEEP:=64,32,16,8,4}" "${THROTTLED=}" "${ABLATIONS=}"
fi
if [ "${SIZE:-full}" = tiny ]; then
    world=scenes config=lab/configs/scenes_nano/diffprune_any.yaml model=scenes-nano device=cpu
    : "${STEPS:=3}" "${BATCH:=2}" "${HELD_OUT:=2}" "${SEEDS:=42}" "${FEW_SEEDS:=42}" "${QUESTIONS:=4}"
    : "${MANY=visionselector}" "${FEW=oc_vtp}"
    : "${PRECISION:=float32}" "${KEEP:=32,16,8}" "${OTHER_KEEP=64,4}" "${JOBS:=2}" "${EVAL_JOBS:=2}" "${EVAL_BATCH:=64}"
    : "${SECONDS_LEFT:=3600}" "${TRAIN_LIMIT:=300}" "${EVAL_LIMIT:=600}" "${GROUP:=12}" "${ABLATION_KEEP:=$KEEP}"
    : "${THROTTLED=32,8}"
else
    world=${WORLD:-scenes} config=lab/configs/${WORLD:-scenes}_llava/diffprune_any.yaml
    model=$world-llava device=${DEVICE:-}
    : "${STEPS:=1200}" "${BATCH:=16}" "${HELD_OUT:=128}" "${SEEDS:=42 123 456 789 1011}" "${FEW_SEEDS:=42 123 456}"
    : "${PRECISION:=bfloat16}" "${QUESTIONS:=500}" "${KEEP:=128,64,32,16,8,4}" "${OTHER_KEEP=256,192,96,48,24}"
    : "${MANY=visionselector glimpse_prune dynamic_llava}" "${FEW=oc_vtp atp_llava dynamicvit p_mod gumbel_ste-masked}"
    : "${JOBS:=16}" "${EVAL_JOBS:=14}" "${EVAL_BATCH:=256}" "${SECONDS_LEFT:=570}" "${TRAIN_LIMIT:=400}"
    : "${EVAL_LIMIT:=300}" "${GROUP:=7}" "${ABLATION_KEEP:=$KEEP}" "${THROTTLED=128,64,32}"
fi
: "${SCORERS=diffprune gumbel_ste diffprune-paper dedicated}" "${DEDICATED_KEEP:=128,64,32}"
: "${ABLATIONS=diffprune-scale diffprune-global diffprune-scale-paper diffprune-global-paper}"
: "${THROTTLED_ABLATION:=${THROTTLED##*,}}" # the smallest, at which a gap shows first
: "${EVAL_SECONDS:=270}" "${KEEP_SECONDS:=45}" # left to the answers and the tables by what comes before them
# Four kinds of task of the paper's ablations.
four=scenes/gqa,scenes/mmbench,scenes/pope,scenes/mme
work=${WORK:-out/study-$world}
mkdir -p "$work"/{train,logs,jobs,results} "$work/$answers" "$out"
for file in ${ANSWERS:-}; do cat "$file"* | tar -xz -C "$work" "$answers" || exit 1; done
if [ -n "${FROM:-}" ] && [ -z "$(ls -A "$work/train")" ]; then cat "$FROM"* | tar -xz -C "$work" || exit 1; fi

# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh
# shellcheck source=runs/packed_models.sh
. runs/packed_models.sh
trap 'stop_pool; exit 143' TERM INT

# --- what is trained ------------------------------------------------------------------------------------------------

own() { # method: its own learning rate and temperatures, where they are not ours
    local still="tau.start=1.0 tau.end=1.0 tau.anneal_steps=0"
    case $1 in
    atp_llava) echo "$still optim.lr=1e-2" ;;
    dynamic_llava) echo "tau.start=1.0 tau.end=0.1 tau.anneal_steps=1.0 optim.lr=2e-3" ;;
    dynamicvit) echo "$still optim.lr=1e-3" ;;
    glimpse_prune) echo "tau.start=1.0 tau.end=0.5" ;;
    oc_vtp) echo "$still optim.lr=1e-3 optim.warmup=0.13" ;;
    p_mod) echo "$still optim.lr=2e-3" ;;
    visionselector) echo "$still method.ramp_steps=300" ;;
    esac
}

train() { # name, seeds, overrides
    local name=$1 seeds=$2 seed todo=() settings
    shift 2
    settings="optim.steps=$STEPS optim.batch_size=$BATCH optim.precision=$PRECISION backbone.dtype=$PRECISION"
    settings+=" data.validation=$HELD_OUT validation.every=0.34 saving.tensorboard=false"
    # shellcheck disable=SC2046,SC2086  # overrides are words
    set -- $settings $(own "$name") "$@" ${EXTRA:-}
    for seed in $seeds; do [ -f "$work/train/$name-$seed/model.safetensors" ] || todo+=("$seed"); done
    [ ${#todo[@]} -gt 0 ] || return 0
    # What was cut off in the middle goes on from its last step.
    case $name in
    diffprune* | gumbel_ste) # seeds in step with each other
        echo "train-$name" "$TRAIN_LIMIT" "$python" -m diffprune_lab.studies.in_step --config "$config" \
            --seeds "$(commas "${todo[@]}")" --out "$work/train/$name-{seed}" "$@" ${COMPILE:+optim.compile=true}
        ;;
    *)
        for seed in "${todo[@]}"; do
            echo "train-$name-$seed" "$TRAIN_LIMIT" "$python" -m diffprune_lab train --json --resume --config "$config" \
                --out "$work/train/$name-$seed" "seed=$seed" "$@"
        done
        ;;
    esac
}

trainings() { # those that are not there yet, the longest first
    local keep name
    for name in $SCORERS; do # and ablations: all seeds in one process
        case $name in
        diffprune | diffprune-paper) of_recipe "$name" "$SEEDS" ;;
        dedicated) ;;
        *) train "$name" "$SEEDS" "method.name=$name" ;;
        esac
    done
    for name in $ABLATIONS; do of_recipe "$name" "$FEW_SEEDS"; done
    case " $SCORERS " in *" dedicated "*)
        for keep in ${DEDICATED_KEEP//,/ }; do
            train "diffprune-k$keep" "$FEW_SEEDS" budget.range=null "budget.keep=$keep"
        done
        ;;
    esac
    for name in $MANY; do train "$name" "$SEEDS" "method.name=$name"; done
    for name in $FEW; do train "$name" "$FEW_SEEDS" "method.name=$name"; done
}

of_recipe() { # name of ours, with -paper behind it by the paper's recipe; seeds
    case $1 in
    *-paper) train "$1" "$2" "method.name=${1%-paper}" recipe=paper ;;
    *) train "$1" "$2" "method.name=$1" recipe=bridge ;;
    esac
}

# --- what is answered -----------------------------------------------------------------------------------------------

trained() { # name of the trainings, then perhaps a label with = behind it: a folder for each seed that ended well
    local seed folder found=()
    for seed in $SEEDS; do
        folder=$work/train/$1-$seed
        [ -f "$folder/model.safetensors" ] && found+=("${2:-}$folder")
    done
    (IFS=,; echo "${found[*]}")
}

commas() { # words: those that are not empty, with commas between
    echo "$@" | sed 's/^ *//; s/ *$//; s/  */,/g'
}

pruners() { grep -o -e '--pruner [^ ]*' <<<"$1" | tr , '\n' | grep -c .; } # how many a command names

evaluate() { # name, then options of `diffprune eval`; nothing where a --pruner is empty
    local name=$1 before
    shift
    case " $* " in *" --pruner  "*) return 0 ;; esac
    # What was asked when fewer of its scorers had been trained is asked anew.
    before=$(grep "^$answers-$name " "$work/jobs/asked.txt" 2>/dev/null | tail -n 1)
    if [ -n "$before" ] && [ "$(pruners "$*")" -gt "$(pruners "$before")" ]; then
        rm -f "$work/$answers/$name".*
    fi
    [ ! -f "$work/$answers/$name.json" ] || return 0
    echo "$answers-$name" "$EVAL_LIMIT" "$python" -m diffprune_lab eval --batch-size "$EVAL_BATCH" ${device:+--device $device} \
        --world-seed "$seed_of_world" --commit "$commit" --out "$work/$answers/$name.json" "$@"
}

outside() { # names of learned methods: in another world those that drop before the language model
    [ -n "$named" ] || { echo "$@"; return; }
    "$python" - "$@" <<'PYTHON'
import sys
from diffprune.registry import METHODS

print(*(name for name in sys.argv[1:] if not METHODS.get(name).is_inside))
PYTHON
}

asked() { echo --tasks "$world" --questions "$QUESTIONS" --keep "$KEEP"; }

evaluations() {
    local name names found=() place keep seed
    # The longest first.
    [ -n "$named" ] || [ -z "$OTHER_KEEP" ] || evaluate any --tasks "$world" --questions "$QUESTIONS" --keep "$OTHER_KEEP" --pruner "$(trained diffprune)" \
        --methods diffprune-diverse,random --seeds 0
    # What shares a process shares a run of the full model, which costs as much as six budgets of a method.
    for seed in $SEEDS; do
        found=("$(SEEDS=$seed trained diffprune)" "$(SEEDS=$seed trained diffprune-paper diffprune-paper=)")
        # shellcheck disable=SC2046
        evaluate "ours@$seed" $(asked) --pruner "$(commas "${found[@]}")" ${found[0]:+--methods diffprune-diverse}
        # Each takes the whole prefix, as much as all budgets of a method together.
        [ -z "$THROTTLED" ] || evaluate "throttled@$seed" --tasks "$world" --questions "$QUESTIONS" --keep "$THROTTLED" --throttled \
            --pruner "$(commas "${found[@]}")"
    done
    for seed in $FEW_SEEDS; do
        found=()
        for name in $ABLATIONS; do found+=("$(SEEDS=$seed trained "$name" "$name=")"); done
        # shellcheck disable=SC2046
        evaluate "ablations@$seed" $(asked) --pruner "$(commas "${found[@]}")"
        [ -z "$THROTTLED" ] || evaluate "throttled@$seed-ablations" --tasks "$world" --questions "$QUESTIONS" \
            --keep "$THROTTLED_ABLATION" --throttled --pruner "$(commas "${found[@]}")"
    done
    found=()
    for keep in ${DEDICATED_KEEP//,/ }; do found+=("$(trained "diffprune-k$keep" "diffprune-dedicated@$keep=")"); done
    # shellcheck disable=SC2046
    [ -n "$named" ] || evaluate dedicated $(asked) --pruner "$(commas "${found[@]}")"
    # Gumbel-STE, which the table of ablations has too; other learned methods, and those without training, a few to a process.
    for seed in $SEEDS; do
        case " $SCORERS " in *" gumbel_ste "*)
            # shellcheck disable=SC2046
            evaluate "gumbel_ste@$seed" $(asked) --pruner "$(SEEDS=$seed trained gumbel_ste)"
            ;;
        esac
        # shellcheck disable=SC2086
        outside $MANY $FEW | xargs -n 3 | while read -r names; do
            found=()
            for name in $names; do found+=("$(SEEDS=$seed trained "$name")"); done
            # shellcheck disable=SC2046
            evaluate "learned@$seed-${names// /+}" $(asked) --pruner "$(commas "${found[@]}")"
        done
    done
    "$python" - "$GROUP" "${FREE:-}" "$named" <<'PYTHON' |
import sys
from diffprune.registry import METHODS

size = int(sys.argv[1])
free = [name for name in METHODS.names() if not METHODS.get(name).trained and name != "full"]
free = [name for name in free if name != "cls_attention"] + ["holov[variant=paper]"]  # one rule is one row
wanted = sys.argv[2].split() or ["random", "oracle", *free]
slow = [name for name in free if METHODS.get(name.partition("[")[0]).place == "inside the LLM"]
names = ["random", "oracle", *(name for name in [*slow, *free] if name != "random" and name not in slow), *slow]
names = [name for name in names if name in wanted and not (sys.argv[3] and name in slow)]
count = -(-len(names) // size)
for first in range(count):  # dealt out, so that slow ones do not come together
    print(first, ",".join(dict.fromkeys(names[first::count])))
PYTHON
        while read -r place names; do
            # shellcheck disable=SC2046
            evaluate "free-$place" $(asked) --model "$model" --methods "$names"
        done
}

# A process that failed is asked again method by method, so that one broken method costs no other its place.
again_one_by_one() {
    local file name names method
    for file in "$work"/jobs/eval.txt; do
        while read -r name _ ; do
            [ -f "$work/$answers/${name#"$answers"-}.json" ] && continue
            names=$(grep -m1 "^$name " "$file" | sed -n 's/.*--methods \([^ ]*\).*/\1/p')
            case $name in "$answers"-free-*) ;; *) continue ;; esac
            for method in ${names//,/ }; do
                # shellcheck disable=SC2046
                evaluate "${name#"$answers"-}-$method" $(asked) --model "$model" --methods "$method"
            done
        done <"$file"
    done
}

# --- tables ---------------------------------------------------------------------------------------------------------

join() { # name, options; files of evaluations that are not there are passed over
    local name=$1 file files=()
    shift
    while [ "$1" != -- ]; do
        for file in "$work/$answers"/$1.json; do
            case $file in *.answers.json) continue ;; esac
            [ -f "$file" ] && files+=("$file")
        done
        shift
    done
    shift
    [ ${#files[@]} -gt 0 ] || return 0
    set -- "$python" -m diffprune.evaluate.join "${files[@]}" --out "$work/results/$name.json" \
        --command "STEPS=$STEPS ${STAGES:+STAGES=\"$STAGES\" }${WORLD:+WORLD=$WORLD }${FREE:+FREE=$FREE }${WORLD_SEED:+WORLD_SEED=$WORLD_SEED }runs/study.sh all OUT COMMIT" --notes "$STEPS steps of $BATCH captions in $PRECISION for every scorer" \
        --tuned "diffprune*-paper*=the paper's recipe as printed, learning rate, temperatures and length of ours, none searched" \
        --tuned 'diffprune*=recipe and settings chosen on the validation split (docs/log.md)' \
        --tuned 'gumbel_ste*=learning rate and temperatures of ours, none searched' \
        --tuned '*=one setting, none searched: runs/study.sh names what is of its own paper or release, the rest is ours' ${MIXED:+--mixed} "$@"
    "$@" || "$@" --methods '*' || "$@" --methods '*' --versus random # where a method is missing: what there is
}

free_tables() { # with methods without training
    local main=${world}_main
    [ "$world" != scarce ] || main=scarce_methods # all of its methods in one table
    join "$main$named" 'ours@*' 'gumbel_ste@*' 'learned@*' 'free-*' -- --versus diffprune-diverse \
        --methods 'diffprune-diverse,diffprune,diffprune-paper,gumbel_ste,random,*'
    [ -z "$named" ] && [ "$world" = scenes ] || return 0
    join "${world}_methods" 'ours@*' 'gumbel_ste@*' 'learned@*' 'free-*' -- --versus diffprune --methods 'random,*'
    join "${world}_random" 'free-*' -- --methods 'random,oracle,fastervlm' --notes "[CLS] attention is listed as fastervlm"
}

tables() {
    if [ "${FREE:-}" != nothing ]; then
        free_tables
    elif has 'learned@*'; then # the trained ones among themselves
        join "${world}_rivals$named" 'ours@*' 'gumbel_ste@*' 'learned@*' -- --versus diffprune-diverse --methods 'diffprune-diverse,diffprune,*'
    fi
    # One world seed is enough for these.
    if [ -z "$named" ] && has 'ablations@*'; then
        # shellcheck disable=SC2046  # options are words
        join "${world}_ablation" 'ours@*' 'gumbel_ste@*' 'ablations@*' -- --versus diffprune --keep "$ABLATION_KEEP" \
            $([ "$world" != scenes ] || echo "--also $four")
    fi
    if [ -z "$named" ] && has dedicated; then
        join "${world}_any_budget" 'ours@*' dedicated any -- --versus diffprune-dedicated --without diffprune-paper
    fi
    ! has 'throttled@*' || join "${world}_throttled$named" 'throttled@*' -- --versus diffprune
    [ "$world" != scarce ] || "$python" -m diffprune_lab.scarce.digest "$work"/results/scarce_*.json # the frozen world's, in every row
}

has() { compgen -G "$work/$answers/$1.json" >/dev/null; } # answers of such a name

pack() {
    (cd "$work" && find status.txt results -name '*.answers.json' -o -type f -print) >"$work/tables.txt"
    tar -czf "$out/tables$named.tgz" -C "$work" -T "$work/tables.txt"
    pieces "$out/answers$named.tgz" -C "$work" "$answers" logs
    # The scorers worth keeping, without their checkpoints.
    (cd "$work" && find train -name model.safetensors -path "train/diffprune-[0-9]*" -print \
        -o -name config.json -path "train/diffprune-[0-9]*" -print -o -name run.yaml -print -o -name metrics.jsonl -print) \
        >"$work/kept.txt"
    [ ! -s "$work/kept.txt" ] || pieces "$out/scorers.tgz" -C "$work" -T "$work/kept.txt"
    ls -l "$out"
}

# --- stages ---------------------------------------------------------------------------------------------------------

run_stage() {
    echo "== $1, $(left) s left"
    case $1 in
    train)
        # Behind the trainings, where there is room for it, what needs none.
        { trainings; [ "$stage" != all ] || evaluations | grep "^$answers-free-"; } >"$work/jobs/train.txt"
        pool "$JOBS" "$work/jobs/train.txt" "$EVAL_SECONDS"
        ;;
    eval)
        evaluations >"$work/jobs/eval.txt"
        cat "$work/jobs/eval.txt" >>"$work/jobs/asked.txt"
        pool "$EVAL_JOBS" "$work/jobs/eval.txt" "$KEEP_SECONDS"
        again_one_by_one >"$work/jobs/again.txt"
        [ ! -s "$work/jobs/again.txt" ] || pool "$EVAL_JOBS" "$work/jobs/again.txt" "$KEEP_SECONDS"
        ;;
    join) tables ;;
    pack) pack ;;
    *) echo "there is no stage $1; choose train, eval, join, pack or all" >&2; exit 2 ;;
    esac
}

stages=$stage
[ "$stage" != all ] || stages=${STAGES:-train eval join pack}
case " $stages " in *" eval "*) ;; *) EVAL_SECONDS=$KEEP_SECONDS ;; esac
case " $stages " in *" train "* | *" eval "*) share_gpu ;; esac
for one in $stages; do run_stage "$one"; done
echo "== done after $SECONDS s: $(grep -c 'code 0' "$work/status.txt" 2>/dev/null) processes ended well, $(grep -vc 'code 0' "$work/status.txt" 2>/dev/null) did not"
