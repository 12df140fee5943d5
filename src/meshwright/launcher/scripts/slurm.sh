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

# USR1 comes before the job's time is over: the ranks save, and the job queues again. On SIGTERM they save and it ends.
ranks='' ending='' told=''
# shellcheck disable=SC2317  # called by the traps
tell_ranks() {
    ending="$1" told=yes
    [ -z "$ranks" ] || kill -TERM "$ranks" 2>/dev/null || true # srun passes it on to every rank
}
trap 'tell_ranks USR1' USR1
trap 'tell_ranks TERM' TERM

attempt=0
while :; do
    # Neighbouring ranks on one node: they are a tensor-parallel group. When one ends, the others have a minute to say
    # what they know.
    srun --nodes=@NODES@ --ntasks=@RANKS@ --ntasks-per-node=@DEVICES@@CPUS@ --distribution=block \
        --kill-on-bad-exit=0 --wait=60 "$python" -m meshwright train @RECIPE@ &
    ranks=$! status=''
    [ -z "$ending" ] || kill -TERM "$ranks" # told before there were ranks
    while [ -z "$status" ] || [ -n "$told" ]; do # a signal ends `wait` before the ranks have ended
        told='' code=0
        wait "$ranks" || code=$?
        if [ -z "$status" ] || [ "$code" -ne 127 ]; then # 127: it has been waited for before
            status=$code
        fi
    done
    ranks=''

    case "$status" in
        0 | 2) exit "$status" ;; # done, or a mistake that a second try would repeat
    esac
    if [ "$ending" = USR1 ]; then
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
    attempt=$((attempt + 1))
    if [ -n "$ending" ] || [ "$status" -eq 143 ] || [ "$attempt" -gt @RESTARTS@ ]; then
        exit "$status"
    fi
    echo "srun ended with exit code $status: starting again ($attempt of @RESTARTS@)" >&2
done
