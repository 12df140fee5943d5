#!/usr/bin/env bash
# @TITLE@
# On every host: MASTER_ADDR=HOST bash THIS_SCRIPT, where HOST is one of them, by a name or address that all others reach.
set -eu
: "${MASTER_ADDR:?say which host the others meet at: MASTER_ADDR=HOST bash $0}"
cd @DIRECTORY@
python=@PYTHON@
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@THREADS@}"

# This host's own address on the way there; and whether it is that host, which torchrun cannot always tell.
address="$("$python" -m meshwright.launcher.hosts "$MASTER_ADDR")"
first="$("$python" -m meshwright.launcher.hosts --is-here "$MASTER_ADDR")"

# A rank that is lost ends the others, and all start again from the newest whole checkpoint. On SIGTERM, which every
# host's script needs, they save first.
exec "$python" -m torch.distributed.run --nnodes @NODES@ --nproc-per-node @DEVICES@ \
    --rdzv-backend c10d --rdzv-id @NAME@ --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}" \
    --rdzv-conf "is_host=$first" --local-addr "$address" \
    --max-restarts @RESTARTS@ --shutdown-timeout @SECONDS@ --log-dir @LOGS@ --tee 2 \
    -m meshwright train @RECIPE@
