#!/bin/bash
# The first process of a host, started by rack.py in namespaces of its own: host.sh DIR NAME ADDRESS [PORT]
# The head gets no PORT, a node the name of its port on the head's switch. It lives until it is killed: a power failure.
set -eu
dir=$1 name=$2 address=$3 port=${4:-}
etc=$dir/etc log=$dir/log pids=$dir/pid config=$etc/sshd_config
trap 'touch "$pids/$name.failed"' EXIT
slurm='' docker='' private_hosts='' configless='' controllers=''
# shellcheck disable=SC1091
. "$etc/switches"

# The owner knows its own process numbers only: ask its /proc, which the head passes on to its nodes.
if [ -z "$port" ]; then
    mount --bind /proc "$dir/proc"
    read -r pid _ <"$dir/proc/self/stat"
else
    read -r pid _ <"$dir/proc/self/stat"
    umount "$dir/proc"
    # A machine keeps its network card: no machine has to learn another address of it when it was off.
    # shellcheck disable=SC2046,SC2086
    card=$(printf '02:00:%02x:%02x:%02x:%02x' $(IFS=. && echo $address))
    # The head's processes are still to be seen here, PID 1 is its init: lay the cable from its side.
    nsenter --net=/proc/1/ns/net sh -euc '
        ip link del "$0" 2>/dev/null || : # the kernel deletes that of a node that has lost power, sooner or later
        ip link add "$0" type veth peer name eth0 address "$1" netns /proc/self/fd/9
        ip link set "$0" master switch up' "$port" "$card" 9</proc/self/ns/net
fi

# Leave the file system of this machine for the host's own disk, with what the table says of the system in it.
enter_private_disk() {
    disk=$dir/disk/$name
    find "$disk/tmp" -mindepth 1 -delete # as Debian does when it starts
    mount --bind "$disk" "$disk"
    mount --all --fstab "$etc/fstab.$name"
    mount -t tmpfs -o mode=755 tmpfs "$disk/run"
    mkdir -p "$disk/run/rack/log" "$disk/run/rack/pid" "$disk/run/old"
    cp -p "$etc/sshd_config.private" "$etc/hostkey.$name" "$disk/run/rack"
    mount --bind "$log" "$disk/run/rack/log"
    mount --bind "$pids" "$disk/run/rack/pid"
    cd "$disk"
    pivot_root . run/old
    cd /
    etc=/run/rack log=/run/rack/log pids=/run/rack/pid config=/run/rack/sshd_config.private
}

hostname "$name"
if [ -n "$port" ] && [ -n "$private_hosts" ]; then
    enter_private_disk
    mount -t proc proc /proc
    umount -l /run/old
    rmdir /run/old
    # One kernel, but to every host its own start.
    cat /proc/sys/kernel/random/uuid >/run/boot_id
    mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
    mount -t sysfs sysfs /sys # which lists the host's own interfaces
else
    mount -t proc proc /proc
    mount -t tmpfs -o mode=755 tmpfs /run
    mount --bind "$etc/passwd" /etc/passwd
    mount --bind "$etc/group" /etc/group
    mount --bind "$etc/hosts.$name" /etc/hosts
    mount --bind "$etc/nsswitch.conf" /etc/nsswitch.conf
    if [ -n "$private_hosts" ]; then mount --all --fstab "$etc/fstab.$name"; fi
fi
# Every slurmd takes the root of a cgroup controller for its own.
if [ -n "$port" ]; then
    for controller in $controllers; do
        top=/sys/fs/cgroup/$controller rack=/sys/fs/cgroup/$controller/${dir##*/}
        mkdir -p "$rack/$name"
        if [ "$controller" = cpuset ]; then
            for cgroup in "$rack" "$rack/$name"; do
                cat $top/cpuset.cpus >"$cgroup/cpuset.cpus"
                cat $top/cpuset.mems >"$cgroup/cpuset.mems"
            done
        fi
        mount --bind "$rack/$name" "$top"
    done
fi
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir /run/sshd

ip link set lo up
if [ -z "$port" ]; then
    ip link add switch type bridge
    ip link set switch up
    ip address add "$address/24" dev switch
else
    ip link set eth0 up
    ip address add "$address/24" dev eth0
fi
# As on any machine that has Docker with a container running: up, and with the same address everywhere.
if [ -n "$docker" ]; then
    ip link add docker0 type bridge
    ip link add veth0 type veth peer name veth1
    ip link set veth0 master docker0 up
    ip link set veth1 up
    ip address add 172.17.0.1/16 dev docker0
    ip link set docker0 up
fi

start_accounting() {
    mkdir -p /run/mysqld "$dir/state/mysql"
    ln -s mysqld /run/mariadbd # the other name that newer ones use
    # No promise to the disk: this database lives as long as the rack.
    options="--no-defaults --user=root --datadir=$dir/state/mysql --innodb-log-file-size=4M
        --innodb-flush-log-at-trx-commit=0"
    # shellcheck disable=SC2086
    mariadb-install-db $options --skip-test-db --skip-name-resolve --auth-root-authentication-method=socket \
        >"$log/mysql-install" 2>&1
    # shellcheck disable=SC2086
    mariadbd $options --socket=/run/mysqld/mysqld.sock --skip-networking >"$log/mysqld" 2>&1 &
    until [ -S /run/mysqld/mysqld.sock ]; do kill -0 $!; sleep 0.02; done
    slurmdbd -D >/dev/null 2>&1 &
    # slurmctld does not start for a cluster that the data base does not know.
    until sacctmgr -i -Q add cluster rack >"$log/sacctmgr" 2>&1; do kill -0 $!; sleep 0.05; done
}

start_slurm() {
    conf_server=
    if [ -n "$port" ] && [ -n "$configless" ]; then
        mount -t tmpfs tmpfs /etc/slurm
        conf_server='--conf-server=head'
    else
        mount --bind "$etc/slurm" /etc/slurm
    fi
    mkdir /run/munge
    # munged goes to the background when it is ready; Slurm's daemons want it so.
    munged --num-threads=2 --key-file="$etc/munge.key" --socket=/run/munge/munge.socket.2 \
        --pid-file=/run/munge/munged.pid --seed-file=/run/munge/seed --log-file="$log/$name.munged"
    if [ -z "$port" ]; then
        if [ -e "$etc/slurm/slurmdbd.conf" ]; then start_accounting; fi
        slurmctld -D -i >/dev/null 2>&1 &
    else
        # As the only one on a machine: in the root of each controller, by what it sees.
        controllers=$controllers conf_server=$conf_server sh -euc 'for each in $controllers; do echo $$ >"/sys/fs/cgroup/$each/cgroup.procs"; done
            exec env --default-signal=INT,QUIT unshare --cgroup slurmd -D $conf_server' >/dev/null 2>&1 &
    fi
}

/usr/sbin/sshd -D -f "$config" -h "$etc/hostkey.$name" -E "$log/$name.sshd" &
sshd=$!
if [ -n "$slurm" ]; then start_slurm; fi
until [ -s /run/sshd.pid ]; do kill -0 "$sshd"; sleep 0.02; done # it is written when sshd listens
echo "$pid" >"$pids/$name.new"
mv "$pids/$name.new" "$pids/$name"

sleep infinity &
while :; do wait || true; done
