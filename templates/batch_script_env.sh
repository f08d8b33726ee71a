# Each bash of the job reads this file (BASH_ENV). srun, torchrun and the like are functions here, since conda and modules
# put commands of their own in front of PATH; a function of the script's own wins. `exec srun` and other shells use PATH.
{user}{
    case ${PATH-} in
    {bin}:*) ;;
    *) PATH={front}${PATH:+:$PATH} ;;
    esac
    clusterddp_run() {
        local clusterddp_name=$1 clusterddp_line= clusterddp_ignored= clusterddp_i clusterddp_status=0
        shift
        # The line of the script: in its function, or where it reads the file that the command is in.
        for ((clusterddp_i = 1; clusterddp_i + 1 < ${#BASH_SOURCE[@]}; clusterddp_i++)); do
            if [ "${BASH_SOURCE[clusterddp_i + 1]}" = {script} ]; then
                clusterddp_line=${BASH_LINENO[clusterddp_i]}
                break
            fi
        done
        if clusterddp_is_only; then
            clusterddp_wait "$@" || clusterddp_status=$?
        else
            CLUSTERDDP_LINE=$clusterddp_line {bin}/"$clusterddp_name" "$@" || clusterddp_status=$?
        fi
        { case $clusterddp_x in *x*) set -x ;; esac; return "$clusterddp_status"; } 2>/dev/null
    }
    # Whether bash alone may have become the command here: in a subshell (`srun ... &`) or in `bash -c`, without jobs and
    # traps of its own. `trap` forgets the traps of the parent, which do not run in a subshell.
    clusterddp_is_only() {
        [ "$BASHPID" != "$$" ] || [ -n "${BASH_EXECUTION_STRING+x}" ] || return 1
        trap : RTMAX
        trap - RTMAX
        clusterddp_ignored=$(trap -p)
        case ${clusterddp_ignored//"trap -- '' SIG"/} in *trap*) return 1 ;; esac
        [ -z "$(jobs -p)" ]
    }
    # The script knows the process of this shell (`PID=$!`) and means the command, which therefore gets its signals.
    clusterddp_wait() {
        local IFS=$' \t\n' clusterddp_pid clusterddp_field clusterddp_mask clusterddp_bit=2
        local clusterddp_signal clusterddp_last= clusterddp_status
        while read -r clusterddp_field clusterddp_mask; do
            case $clusterddp_field in SigIgn:) break ;; esac
        done </proc/"$BASHPID"/status
        # A command in the background ignores SIGINT and SIGQUIT; in a subshell for one, bash itself ignores SIGQUIT.
        [ "$BASHPID" != "$$" ] || clusterddp_bit=1
        CLUSTERDDP_LINE=$clusterddp_line CLUSTERDDP_WAITED=$((0x$clusterddp_mask >> clusterddp_bit & 1)) {bin}/"$clusterddp_name" "$@" <&0 &
        clusterddp_pid=$!
        for clusterddp_signal in HUP INT QUIT USR1 USR2 TERM ALRM; do
            case $clusterddp_ignored in *" SIG$clusterddp_signal"*) continue ;; esac
            trap "clusterddp_signal=$clusterddp_signal; kill -$clusterddp_signal $clusterddp_pid" $clusterddp_signal
        done
        while :; do
            clusterddp_signal= clusterddp_status=0
            wait "$clusterddp_pid" || clusterddp_status=$?
            [ -n "$clusterddp_signal" ] || break
            clusterddp_last=$clusterddp_signal
        done
        for clusterddp_signal in HUP INT QUIT USR1 USR2 TERM ALRM; do
            case $clusterddp_ignored in *" SIG$clusterddp_signal"*) continue ;; esac
            trap - $clusterddp_signal
        done
        if [ -n "$clusterddp_last" ] && [ "$clusterddp_status" = $((128 + $(kill -l "$clusterddp_last"))) ]; then
            kill -"$clusterddp_last" "$BASHPID" # nothing follows in a subshell that this signal ends
        fi
        return "$clusterddp_status"
    }
{functions}
} 2>/dev/null
