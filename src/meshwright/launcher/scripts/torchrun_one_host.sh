#!/usr/bin/env bash
# @TITLE@
set -eu
cd @DIRECTORY@
python=@PYTHON@
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@THREADS@}"

# A rank that is lost ends the others, and all start again from the newest whole checkpoint. On SIGTERM they save first.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node @DEVICES@ \
    --max-restarts @RESTARTS@ --shutdown-timeout @SECONDS@ --log-dir @LOGS@ --tee 2 \
    -m meshwright train @RECIPE@
