# Sourced by scripts that run many processes side by side. They set `python`, `work` (for logs/ and status.txt) and
# SECONDS_LEFT; MPS=1 lets processes share the GPU at the same time, where it has a daemon for that.
# Processes that share a GPU share its faults: one that is killed in the middle of a kernel can take the others with it.

left() { echo $((SECONDS_LEFT - SECONDS)); }

pool() { # how many at a time, file with one job a line (name, limit in seconds, command), seconds to leave to what comes after
    local room=$(($(left) - $3))
    [ "$room" -gt 5 ] || { echo "no time left"; return 0; }
    "$python" -m diffprune_lab.studies.side_by_side "$2" --at-once "$1" --seconds "$room" --work "$work" &
    pool_running=$!
    wait "$pool_running"
    pool_running=
}
pool_running=
stop_pool() { [ -z "$pool_running" ] || kill "$pool_running"; }

keep_filling() { # seconds between two calls, what is called: until stop_filling
    {
        trap 'kill "$!" 2>/dev/null; exit' TERM # after what is being written just then
        while sleep "$1" & wait "$!"; do "$2"; done
    } &
    keeper=$!
}
keeper=
stop_filling() {
    [ -z "$keeper" ] || { kill "$keeper" 2>/dev/null; wait "$keeper" 2>/dev/null; }
    keeper=
}

share_gpu() {
    [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || return 0 # they do already
    [ "${MPS:-0}" = 1 ] && command -v nvidia-cuda-mps-control >/dev/null || return 0
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) && export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    if nvidia-cuda-mps-control -d && timeout 40 "$python" -c 'import torch; torch.ones(2, device="cuda").sum().item()'; then
        trap stop_sharing EXIT # the daemon would stay
        echo "processes share the GPU"
    else
        stop_sharing
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
}
stop_sharing() { echo quit | nvidia-cuda-mps-control >/dev/null 2>&1 || true; } # there may be none
