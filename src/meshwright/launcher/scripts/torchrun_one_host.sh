#!/usr/bin/env bash
# @TITLE@
set -eu
cd @DIRECTORY@
python=@PYTHON@
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@THREADS@}"

# After a lost rank all ranks restart from the newest complete checkpoint. On SIGTERM they save first.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node @DEVICES@ \
    --max-restarts @RESTARTS@ --shutdown-timeout @SECONDS@ --log-dir @LOGS@ --tee 2 \
    -m meshwright train @RECIPE@
