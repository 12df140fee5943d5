#!/usr/bin/env bash
# @TITLE@
# On every host: MASTER_ADDR=HOST bash THIS_SCRIPT, where HOST is the name or address of one of them that all others reach.
set -eu
: "${MASTER_ADDR:?name the host where all ranks meet: MASTER_ADDR=HOST bash $0}"
cd @DIRECTORY@
python=@PYTHON@
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@THREADS@}"

# This host's own address on the route there, and whether it is that host, which torchrun cannot always determine.
address="$("$python" -m meshwright.launcher.hosts "$MASTER_ADDR")"
first="$("$python" -m meshwright.launcher.hosts --is-here "$MASTER_ADDR")"

# After a lost rank all ranks restart from the newest complete checkpoint. On SIGTERM, which has to be sent to every
# host's script, they save first.
exec "$python" -m torch.distributed.run --nnodes @NODES@ --nproc-per-node @DEVICES@ \
    --rdzv-backend c10d --rdzv-id @NAME@ --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}" \
    --rdzv-conf "is_host=$first" --local-addr "$address" \
    --max-restarts @RESTARTS@ --shutdown-timeout @SECONDS@ --log-dir @LOGS@ --tee 2 \
    -m meshwright train @RECIPE@
