#!/bin/bash
# The first process of a host, started by rack.py in namespaces of its own: host.sh DIR NAME ADDRESS [PORT]
# The head gets no PORT, a node the name of its port on the head's switch. It lives until it is killed: a power failure.
set -eu
dir=$1 name=$2 address=$3 port=${4:-}
trap 'touch "$dir/pid/$name.failed"' EXIT

# The owner knows its own process numbers only: ask its /proc, which the head passes on to its nodes.
if [ -z "$port" ]; then
    mount --bind /proc "$dir/proc"
    read -r pid _ <"$dir/proc/self/stat"
else
    read -r pid _ <"$dir/proc/self/stat"
    umount "$dir/proc"
    # The head's processes are still to be seen here, PID 1 is its init: lay the cable from its side.
    nsenter --net=/proc/1/ns/net sh -euc '
        if ip link show "$0" >/dev/null 2>&1; then ip link del "$0"; fi
        ip link add "$0" type veth peer name eth0 netns 1
        ip link set "$0" master switch up' "$port"
fi

hostname "$name"
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir /run/sshd /run/munge
mount --bind "$dir/etc/slurm" /etc/slurm
mount --bind "$dir/etc/passwd" /etc/passwd
mount --bind "$dir/etc/group" /etc/group
mount --bind "$dir/etc/hosts.$name" /etc/hosts

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
ip link add docker0 type bridge
ip link add veth0 type veth peer name veth1
ip link set veth0 master docker0 up
ip link set veth1 up
ip address add 172.17.0.1/16 dev docker0
ip link set docker0 up

start_accounting() {
    mkdir -p /run/mysqld "$dir/state/mysql"
    # No promise to the disk: this database lives as long as the rack.
    options="--no-defaults --user=root --datadir=$dir/state/mysql --innodb-log-file-size=4M
        --innodb-flush-log-at-trx-commit=0"
    # shellcheck disable=SC2086
    mariadb-install-db $options --skip-test-db --skip-name-resolve --auth-root-authentication-method=socket \
        >"$dir/log/mysql-install" 2>&1
    # shellcheck disable=SC2086
    mariadbd $options --socket=/run/mysqld/mysqld.sock --skip-networking >"$dir/log/mysqld" 2>&1 &
    until [ -S /run/mysqld/mysqld.sock ]; do kill -0 $!; sleep 0.02; done
    slurmdbd -D >/dev/null 2>&1 &
    # slurmctld does not start for a cluster that the data base does not know.
    until sacctmgr -i -Q add cluster rack >"$dir/log/sacctmgr" 2>&1; do kill -0 $!; sleep 0.05; done
}

# munged goes to the background when it is ready; Slurm's daemons want it so.
munged --num-threads=2 --key-file="$dir/etc/munge.key" --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
    --seed-file=/run/munge/seed --log-file="$dir/log/$name.munged"
/usr/sbin/sshd -D -f "$dir/etc/sshd_config" -h "$dir/etc/hostkey.$name" -E "$dir/log/$name.sshd" &
if [ -z "$port" ]; then
    if [ -e "$dir/etc/slurm/slurmdbd.conf" ]; then start_accounting; fi
    slurmctld -D -i >/dev/null 2>&1 &
else
    slurmd -D >/dev/null 2>&1 &
fi
echo "$pid" >"$dir/pid/$name.new"
mv "$dir/pid/$name.new" "$dir/pid/$name"

sleep infinity &
while :; do wait || true; done
