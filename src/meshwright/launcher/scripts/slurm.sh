#!/usr/bin/env bash
# @TITLE@
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=@DEVICES@
#SBATCH --output=@NAME@-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@@SECONDS@@OPTIONS@
set -eu
cd @DIRECTORY@
python=@PYTHON@

# USR1 comes before the job's time limit: the ranks save, and the job is requeued. On SIGTERM they save and it ends.
ranks='' ending='' signalled=''
# shellcheck disable=SC2317  # called by the traps
stop_ranks() {
    ending="$1" signalled=yes
    [ -z "$ranks" ] || kill -TERM "$ranks" 2>/dev/null || true # srun forwards it to every rank
}
trap 'stop_ranks USR1' USR1
trap 'stop_ranks TERM' TERM

attempt=0
while :; do
    # Consecutive ranks, which form tensor-parallel groups, on one node. When one ends, the others have a minute to
    # report.
    srun --nodes=@NODES@ --ntasks=@RANKS@ --ntasks-per-node=@DEVICES@@CPUS@ --distribution=block \
        --kill-on-bad-exit=0 --wait=60 "$python" -m meshwright train @RECIPE@ &
    ranks=$! status=''
    [ -z "$ending" ] || kill -TERM "$ranks" # the signal came before the ranks started
    while [ -z "$status" ] || [ -n "$signalled" ]; do # a signal ends `wait` before the ranks have ended
        signalled='' code=0
        wait "$ranks" || code=$?
        if [ -z "$status" ] || [ "$code" -ne 127 ]; then # 127: it was reaped before
            status=$code
        fi
    done
    ranks=''

    case "$status" in
        0 | 2) exit "$status" ;; # done, or a user error that a retry would repeat
    esac
    if [ "$ending" = USR1 ]; then
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
    attempt=$((attempt + 1))
    if [ -n "$ending" ] || [ "$status" -eq 143 ] || [ "$attempt" -gt @RESTARTS@ ]; then
        exit "$status"
    fi
    echo "srun ended with exit code $status: restarting ($attempt of @RESTARTS@)" >&2
done
