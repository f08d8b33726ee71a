#!/bin/sh
# The batch script of every run. It is constant, so a shell never reads text of a spec.
# Its arguments are PYTHON RUN_DIR [IMPORT_PATH [LIBRARY_PATH]]; the job starts with a minimal environment.
if [ -n "${3-}" ]; then
    PYTHONPATH=$3
    export PYTHONPATH
fi
if [ -n "${4-}" ]; then
    LD_LIBRARY_PATH=$4
    export LD_LIBRARY_PATH
fi
trap '' TERM  # until Python handles it
cd / || exit  # Python imports from the directory that it starts in
exec "$1" -m clusterddp.places.slurm.batch "$2"
