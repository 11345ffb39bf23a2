#!/usr/bin/env bash
# Which choice deploys our scorers: settings compared on the validation split, the best of them measured on the test split
# of two worlds beside every method that drops before the language model. Trains nothing.
#
#   runs/choice_study.sh STAGE OUT COMMIT FOLDER ...            STAGE: pick | test | join | all
#
#   runs/choice_study.sh all out/choice abc1234 scenes-llava-diffprune
#   runs/choice_study.sh all out/choice abc1234 out/study-scenes/train/diffprune-{42,123,456}
#   CHOICE='diffprune-diverse[beta=2;features=scorer]' runs/choice_study.sh test out/choice abc1234 FOLDER ...
#
# OUT gets pick.json and best.txt, over all folders together, and of each world choice_world0.json and choice_world1.json,
# joined from processes side by side. Settings: QUESTIONS, PICK_QUESTIONS,
# KEEP, PICK_KEEP, WORLDS, JOBS, SECONDS_LEFT, LEARNED (LABEL=FOLDER,...: trained rivals), DEVICE, BATCH; MPS=1.
set -uo pipefail

stage=$1 out=$2 commit=$3
shift 3
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
python=${PYTHON:-python3}
: "${QUESTIONS:=500}" "${PICK_QUESTIONS:=150}" "${KEEP:=64,32,16,8,4}" "${PICK_KEEP:=16,8,4}" "${WORLDS:=0 1}" "${JOBS:=10}"
: "${SECONDS_LEFT:=570}" "${BATCH:=256}" "${DEVICE:=}" "${LEARNED:=}"
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
work=$out/work
mkdir -p "$work"/{logs,eval,jobs}
pruners=$(IFS=,; echo "$*")

# shellcheck source=runs/side_by_side.sh
. runs/side_by_side.sh
trap 'stop_pool; exit 143' TERM INT

measure() { # name, options of the study
    local name=$1
    shift
    echo "$name" "$SECONDS_LEFT" "$python" -m diffprune_lab.studies.choice --batch-size "$BATCH" ${DEVICE:+--device "$DEVICE"} \
        --commit "$commit" --out "$work/eval/$name.json" "$@"
}

in_groups() { # how many in one, of the lines read: each group with commas between
    paste -sd "$(printf ',%.0s' $(seq 2 "$1"))\n"
}

pick() { # every setting on all folders, some settings a process
    local group number=0
    while read -r group; do
        measure "pick$number" --pruners "$pruners" --methods "$group" --split validation --questions "$PICK_QUESTIONS" \
            --keep "$PICK_KEEP"
        number=$((number + 1))
    done < <("$python" -m diffprune_lab.studies.choice --list grid | in_groups 2) >"$work/jobs/pick.txt"
    pool "$JOBS" "$work/jobs/pick.txt" 20
    "$python" -m diffprune.evaluate.join "$work"/eval/pick*[0-9].json --out "$out/pick.json" --methods '*' \
        --command "runs/choice_study.sh pick OUT COMMIT FOLDER ..." --notes "validation split"
    "$python" -m diffprune_lab.studies.choice --best-of "$out/pick.json" >"$out/best.txt"
    echo "the validation split chooses $(cat "$out/best.txt")"
}

tests() { # one process for our scorers and some for the rivals, in each world
    local best=${CHOICE:-$(cat "$out/best.txt")} world group number set_of
    mapfile -t groups < <("$python" -m diffprune_lab.studies.choice --list rivals | in_groups 4)
    for world in $WORLDS; do
        set_of="--split test --world $world --questions $QUESTIONS --keep $KEEP"
        # shellcheck disable=SC2086  # options are words
        measure "ours@$world" --pruners "$pruners" --methods "diffprune,$best" $set_of
        # shellcheck disable=SC2086
        measure "oracle@$world" --methods oracle $set_of
        # shellcheck disable=SC2086
        [ -z "$LEARNED" ] || measure "learned@$world" --pruners "$LEARNED" $set_of
        number=0
        for group in "${groups[@]}"; do
            # shellcheck disable=SC2086
            measure "free$number@$world" --methods "$group" $set_of
            number=$((number + 1))
        done
    done >"$work/jobs/test.txt"
    pool "$JOBS" "$work/jobs/test.txt" 25
}

join() {
    local best=${CHOICE:-$(cat "$out/best.txt")} world files
    for world in $WORLDS; do
        files=$(find "$work/eval" -name "*@$world.json" | sort)
        # shellcheck disable=SC2086  # files are words
        "$python" -m diffprune.evaluate.join $files --out "$out/choice_world$world.json" --versus "$best" --methods '*' \
            --command "runs/choice_study.sh all OUT COMMIT FOLDER ..." --notes "world $world; $best is what the validation split chose"
    done
    tar -czf "$out/answers.tgz" -C "$work" eval logs
    cp "$work/status.txt" "$out/" 2>/dev/null
}

run_stage() {
    echo "== $1, $(left) s left"
    case $1 in
    pick) share_gpu; pick ;;
    test) share_gpu; tests ;;
    join) join ;;
    *) echo "there is no stage $1; choose pick, test, join or all" >&2; exit 2 ;;
    esac
}

[ $# -gt 0 ] || { echo "name at least one folder of a trained scorer, such as scenes-llava-diffprune" >&2; exit 2; }
if [ "$stage" = all ]; then
    for one in pick test join; do run_stage "$one"; done
else
    run_stage "$stage"
fi
echo "== done after $SECONDS s: $(grep -c 'code 0' "$work/status.txt" 2>/dev/null) processes ended well, $(grep -vc 'code 0' "$work/status.txt" 2>/dev/null) did not"
