#!/usr/bin/env bash
# Two hosts on one machine: runs `brigade bench` on one rank in each of two network namespaces, which are joined by a
# pair of virtual Ethernet devices that carry no more than RATE in each direction.
#
#   tests/two_hosts.sh RATE [option of brigade bench]...        such as: tests/two_hosts.sh 500mbit --rounds 20
#
# RATE is written as tc(8) takes it. Each host has a torchrun of its own and, where there are two cores, one of them.
# The namespaces belong to this script's processes: they are gone when it ends, however it ends. Exit status 77 where
# the machine cannot do this; otherwise that of the host which failed, or 0.
set -euo pipefail

cannot() {
    echo "two_hosts: $1" >&2
    exit 77
}

if [[ $# -lt 1 ]]; then
    echo "usage: two_hosts.sh RATE [option of brigade bench]..." >&2
    exit 2
fi

python=${PYTHON:-python3}
namespaces=(unshare --net --pid --fork --kill-child --mount-proc)
[[ $(id -u) == 0 ]] || namespaces+=(--map-root-user)

if [[ -z ${TWO_HOSTS_INSIDE:-} ]]; then
    for program in unshare nsenter ip tc; do
        command -v "$program" >/dev/null || cannot "there is no program $program here"
    done
    "${namespaces[@]}" true 2>/dev/null || cannot "this user may not make network namespaces here"
    TWO_HOSTS_INSIDE=1 exec "${namespaces[@]}" "$0" "$@"
fi

# From here on, in the first host. The second lives as long as the process that sleeps in it.
rate=$1
shift
exec {ready}< <(exec unshare --net sh -c "echo; exec sleep infinity")
second=$!
read -r <&"$ready" # it is in a namespace of its own now

on_second() {
    nsenter --target "$second" --net "$@"
}

connect() { # ADDRESS, and the command that leads to the host
    local address=$1
    shift
    "$@" ip link set lo up
    "$@" ip address add "$address/24" dev wire
    "$@" ip link set wire up
    "$@" tc qdisc add dev wire root tbf rate "$rate" burst 256kb limit 64mb # longer than any queue: nothing is dropped
}

ip link add wire type veth peer name wire netns "$second" || cannot "this kernel has no veth devices"
connect 10.77.0.1 env || cannot "the device could not be set up"
connect 10.77.0.2 on_second || cannot "the device could not be set up"

bench() { # ADDRESS, whether it keeps the store (1 or 0), CORE, the command that leads to the host, options
    local pinned=()
    [[ $(env -u OMP_NUM_THREADS nproc) -lt 2 ]] || pinned=(taskset --cpu-list "$3")
    # Both hosts have one name, so that it must not be looked up: not by gloo, and not by torchrun.
    GLOO_SOCKET_IFNAME=wire $4 "${pinned[@]}" "$python" -m torch.distributed.run \
        --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-id bench \
        --rdzv-conf "is_host=$2,join_timeout=60" --local-addr "$1" -m brigade bench --target solutions "${@:5}"
}

status=0
bench 10.77.0.1 1 0 env "$@" &
first_bench=$!
bench 10.77.0.2 0 1 on_second "$@" &
second_bench=$!
wait "$first_bench" || status=$?
wait "$second_bench" || status=$?
exit "$status"
