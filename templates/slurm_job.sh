#!/bin/sh
# The batch script of every run: constant, so nothing of a spec is ever read by a shell as text.
# PYTHON RUN_DIR [IMPORT_PATH [LIBRARY_PATH]] arrive as arguments; the job begins with a bare environment.
if [ -n "${3-}" ]; then
    PYTHONPATH=$3
    export PYTHONPATH
fi
if [ -n "${4-}" ]; then
    LD_LIBRARY_PATH=$4
    export LD_LIBRARY_PATH
fi
exec "$1" -m clusterddp.launchers.slurm.batch "$2"
