#!/usr/bin/env bash
# What trained scorers of the study can be asked beside its tables, of both worlds side by side: the leak, coherence,
# landscape and alignment, into <world>_<probe>.json.
#
#   runs/scarce_probes.sh OUT COMMIT STUDY...
#
#   runs/scarce_probes.sh out/results abc1234 out/study-scenes out/study-scarce
#
# STUDY are WORK folders of runs/study.sh, of one world or of both; every ended training below them (train/NAME-SEED) that still
# has its checkpoints is taken, for the throttler is there. What is missing is passed over. A run's own config says of which
# world it is. OUT gets probes.tgz with results and logs, and what became of each process is printed; the exit code is 0
# where at least one file was made. PACK=0 copies the results files to OUT instead.
# What is made lies in WORK (out/probes) and is not made again.
# Settings: SEEDS (of the trainings that are taken), SECONDS_LEFT for all, SIZE=tiny DEVICE=cpu for a trial, MPS=0 keeps
# the processes from sharing the GPU at the same time.
set -uo pipefail

out=$1 commit=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$here/src:$here/lab PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=${TF32:-1} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
: "${SEEDS:=42 123 456}" "${SECONDS_LEFT:=150}" "${SIZE:=full}" "${DEVICE:=}" "${MPS:=1}"
work=${WORK:-$here/out/probes}
mkdir -p "$out" "$work"/{logs,results}
: >"$work/status.txt"
# shellcheck source=runs/side_by_side.sh
. "$here/runs/side_by_side.sh"
trap 'stop_pool; exit 143' TERM INT
[ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || share_gpu

find_runs() { # world, names: folders of ended trainings of that world
    local world=$1 name seed top folder
    shift
    for top in "${tops[@]}"; do
        for name in "$@"; do
            for seed in $SEEDS; do
                folder=$top/train/$name-$seed
                [ -f "$folder/model.safetensors" ] && compgen -G "$folder/checkpoint-*" >/dev/null || continue
                grep -A1 '^data:' "$folder/run.yaml" | grep -q "name: $world$" || continue
                echo "$folder"
            done
        done
    done
}

tops=("$@")
: >"$work/jobs.txt"
for world in scenes scarce; do
    mapfile -t throttled < <(find_runs "$world" diffprune diffprune-{global,scale}{,-paper} diffprune-paper)
    if [ ${#throttled[@]} -gt 0 ]; then
        echo "leak-$world" "$SECONDS_LEFT" "$python" -m diffprune_lab.studies.leak --runs "${throttled[@]}" --size "$SIZE" \
            --out "$work/results/${world}_leak.json" --commit "$commit" ${DEVICE:+--device $DEVICE} >>"$work/jobs.txt"
    fi
    mapfile -t scorers < <(find_runs "$world" diffprune diffprune-paper gumbel_ste)
    [ ${#scorers[@]} -gt 0 ] || { echo "$world: no training with its checkpoint below ${tops[*]}"; continue; }
    model=$(sed -n '/^backbone:/,/^[a-z]/s/^  name: //p' "${scorers[0]}/run.yaml")
    for probe in landscape coherence alignment; do
        echo "$probe-$world" "$SECONDS_LEFT" "$python" -m diffprune_lab probe "$probe" --backbone "$model" --size "$SIZE" \
            --weights "$(IFS=,; echo "${scorers[*]}")" --out "$work/results" --commit "$commit" ${DEVICE:+--device $DEVICE} \
            >>"$work/jobs.txt"
    done
done
pool "${JOBS:-8}" "$work/jobs.txt" 5
cat "$work/status.txt"
grep -ahE '^(bridge|paper) ' "$work"/logs/leak-*.log
find "$work/results" -name '.*.lock' -delete
ls "$work"/results/*.json >/dev/null 2>&1 || { echo "no file was made" >&2; exit 1; }
if [ "${PACK:-1}" = 1 ]; then tar -czf "$out/probes.tgz" -C "$work" results logs status.txt; else cp "$work"/results/*.json "$out/"; fi
echo "== done after $SECONDS s"
