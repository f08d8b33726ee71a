# The one constant command that clusterddp runs on every host. Sites may allow-list it, so only comments may change. What
# differs from host to host is read from standard input, one line each: python, venv, conda, modules, any of them empty.
# The lines are joined by blanks, so each ends where the next may follow; single quotes are not allowed. sh, bash, zsh,
# fish and csh have to read it alike.
umask 077;
IFS= read -r python && IFS= read -r venv && IFS= read -r conda && IFS= read -r modules || exit 96;
fail() { echo "clusterddp: $*" >&2; exit 97; };
at_home() { case $1 in "~/"*) echo "$HOME/${1#"~/"}";; *) echo "$1";; esac; };
if [ -n "$modules" ]; then
    for init in "$MODULESHOME/init/sh" /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh
        /usr/share/modules/init/sh /usr/share/lmod/lmod/init/sh; do
        if command -v module >/dev/null 2>&1; then break; fi;
        if [ -r "$init" ]; then . "$init" >&2; fi;
    done;
    command -v module >/dev/null 2>&1 || fail "there is no command module, and modules are asked for: $modules";
    set -f;
    for name in $modules; do module load "$name" >&2 || fail "module load $name failed"; done;
    set +f;
fi;
if [ -n "$conda" ]; then
    venv=;
    case $conda in
        /* | "~/"*) venv=$(at_home "$conda");;
        *) for base in "${CONDA_EXE%/bin/conda}" "$(conda info --base 2>/dev/null)" "$HOME/miniforge3" "$HOME/mambaforge"
            "$HOME/miniconda3" "$HOME/anaconda3" "$HOME/micromamba" /opt/conda /opt/miniforge3 /opt/miniconda3
            /opt/anaconda3; do
            if [ -z "$venv" ] && [ "$conda" = base ] && [ -x "$base/bin/python" ]; then venv=$base; fi;
            if [ -z "$venv" ] && [ -x "$base/envs/$conda/bin/python" ]; then venv=$base/envs/$conda; fi;
        done;;
    esac;
    if [ -z "$venv" ]; then fail "there is no conda environment $conda; its path names it for certain"; fi;
    CONDA_PREFIX=$venv; export CONDA_PREFIX;
elif [ -n "$venv" ]; then
    venv=$(at_home "$venv"); VIRTUAL_ENV=$venv; export VIRTUAL_ENV;
fi;
if [ -n "$venv" ]; then
    [ -x "$venv/bin/python" ] || fail "there is no $venv/bin/python";
    PATH=$venv/bin:$PATH; export PATH;
    python=${python:-$venv/bin/python};
fi;
python=$(at_home "${python:-python3}");
command -v "$python" >/dev/null 2>&1 || fail "there is no $python";
exec "$python" -I -c "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
