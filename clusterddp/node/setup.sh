# Runs the setup lines of a spec on a node, by bash, and writes the environment after them.
# Its arguments: the file of the lines; the file for the environment; the directory of our package, or nothing if the
# lines may not choose the Python; code that runs a module of it; the variables of a conda environment that is activated
# after the lines, NAME=value, or nothing.
clusterddp_file=$1 clusterddp_result=$2 clusterddp_package=$3 clusterddp_ask=$4 clusterddp_variables=("${@:5}")
set --
clusterddp_fail() {
    printf 'clusterddp: %s\n' "$1" >&2
    exit "${2:-1}"
}
clusterddp_source() { # the first of these files that can be read and defines the command
    local name=$1 file
    shift
    for file; do
        if [ -r "$file" ]; then . "$file"; fi
        if ! clusterddp_is_ours "$name"; then return 0; fi
    done
    echo "$name: this node has no such command, and no file that defines it was found" >&2
    return 127
}
clusterddp_is_ours() { case $(declare -f "$1") in *clusterddp_* | '') return 0 ;; *) return 1 ;; esac; }
# A shell that is no login shell has not got the functions of the site: each is defined by its first use.
clusterddp_module() {
    clusterddp_source module "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/*modules*.sh \
        /etc/profile.d/*lmod*.sh /usr/share/modules/init/bash /usr/share/lmod/lmod/init/bash /etc/profile.d/modules.sh
}
clusterddp_conda() {
    local program
    program=$(type -P conda) || program=
    clusterddp_source conda "${CONDA_EXE%/bin/conda}/etc/profile.d/conda.sh" "${program%/*}/../etc/profile.d/conda.sh" \
        {"$HOME"/{miniforge3,mambaforge,miniconda3,anaconda3},/opt/{conda,miniforge3,miniconda3,anaconda3}}/etc/profile.d/conda.sh
}
clusterddp_hook() {
    eval "$("${MAMBA_EXE:-$1}" shell hook --shell bash 2>/dev/null || command "$1" shell hook --shell bash)"
    ! clusterddp_is_ours "$1"
}
declare -F module >/dev/null || module() { clusterddp_module && module "$@"; }
declare -F ml >/dev/null || ml() { clusterddp_module && ml "$@"; }
declare -F conda >/dev/null || conda() { clusterddp_conda && conda "$@"; }
declare -F micromamba >/dev/null || micromamba() { clusterddp_hook micromamba && micromamba "$@"; }
declare -F mamba >/dev/null || mamba() { clusterddp_hook mamba && mamba "$@"; }
clusterddp_before=$(type -P python || type -P python3)
# A failing line of the file itself; what is sourced or called there may fail inside.
trap 'clusterddp_code=$?; [ "${BASH_SOURCE[0]}" != "$clusterddp_file" ] || clusterddp_fail "line $LINENO" "$clusterddp_code"' ERR
. "$clusterddp_file"
clusterddp_code=$?
trap - ERR
[ "$clusterddp_code" = 0 ] || clusterddp_fail "the lines" "$clusterddp_code"
if [ "${#clusterddp_variables[@]}" != 0 ]; then
    clusterddp_path=$PATH
    export "${clusterddp_variables[@]}"
    PATH=$PATH:$clusterddp_path
    for clusterddp_file in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do
        if [ -r "$clusterddp_file" ]; then . "$clusterddp_file"; fi
    done
fi
clusterddp_python=$(type -P python || type -P python3) clusterddp_facts=
if [ -n "$clusterddp_package" ] && [ "$clusterddp_python" != "$clusterddp_before" ]; then
    clusterddp_facts=$(PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$clusterddp_package \
        "$clusterddp_python" -c "$clusterddp_ask" clusterddp.facts.torch) && [ -n "$clusterddp_facts" ] ||
        clusterddp_fail "$clusterddp_python, which the lines put first on PATH, cannot run the ranks"
else
    clusterddp_python=
fi
{
    printf '%s\0' "$clusterddp_python" "$clusterddp_facts"
    exec /usr/bin/env -0
} >"$clusterddp_result"
