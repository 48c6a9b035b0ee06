#!/usr/bin/env bash
# A Docker engine in a directory, for a machine that has none: nothing is installed but what is missing of runc, iptables
# and mmdebstrap.
#
#     private_engine.sh start DIRECTORY PYTHON    prints variables to be evaluated by a shell
#     private_engine.sh stop DIRECTORY
#
# There is no registry to pull from, so the base images are made of Debian packages: Debian's Python for the services and
# Debian's Redis, which is the oldest that headrace takes. Python packages are fetched by the pip of this machine, with its
# configuration, and handed to the builds over loopback. All of that stays in DIRECTORY for the next time.
set -euo pipefail
mode=$1
d=$(mkdir -p "$2" && cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
suite=bookworm plugins=trixie

say() { printf 'engine: %s\n' "$*" >&2; }

stop() {
    local name pid
    for name in wheels docker; do
        pid=$(cat "$d/$name.pid" 2>/dev/null || true)
        [[ -n $pid ]] && kill "$pid" 2>/dev/null || true
        for _ in $(seq 100); do
            [[ -n $pid && -d /proc/$pid ]] || break
            sleep 0.2
        done
        rm -f "$d/$name.pid"
    done
    [[ ! -d $d/data ]] || clear_network
}

clear_network() { # what dockerd leaves in the kernel
    local table chain policy forwards
    command -v iptables >/dev/null || return 0
    for table in filter nat; do
        iptables -t "$table" -S | sed -nE 's/^-A (.*(-j DOCKER|-s 10\.21[34]\.|-[io] (docker0|br-[0-9a-f]{12}) ))/-D \1/p' |
            while read -r -a rule; do iptables -t "$table" "${rule[@]}" || true; done
        for chain in $(iptables -t "$table" -S | sed -n 's/^-N \(DOCKER.*\)/\1/p'); do iptables -t "$table" -F "$chain"; done
        for chain in $(iptables -t "$table" -S | sed -n 's/^-N \(DOCKER.*\)/\1/p'); do iptables -t "$table" -X "$chain"; done
    done
    ip link delete docker0 2>/dev/null || true
    if [[ -s $d/forwarding ]]; then
        read -r policy forwards <"$d/forwarding"
        iptables -P FORWARD "$policy"
        echo "$forwards" >/proc/sys/net/ipv4/ip_forward
        rm -f "$d/forwarding"
    fi
}

keep_forwarding() { # what dockerd changes besides: it forwards packets, and drops those that are not its own
    echo "$(iptables -S FORWARD | sed -n 's/^-P FORWARD //p') $(cat /proc/sys/net/ipv4/ip_forward)" >"$d/forwarding"
}

apt_of() { # apt of another release, with lists and cache of its own
    local release=$1 own=$d/apt-$1
    shift
    mkdir -p "$own/lists/partial" "$own/cache/archives/partial"
    local mirror
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | head -n 1)
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} $release main" \
        >"$own/sources.list"
    apt-get -qq -o Dir::Etc::sourcelist="$own/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists="$own/lists" -o Dir::Cache="$own/cache" -o Dir::State::status=/dev/null \
        -o APT::Sandbox::User=root "$@"
}

unpack() { # PACKAGE... into $d/$1
    local target=$d/$1 release=$2
    shift 2
    local scratch
    scratch=$(mktemp -d -p "$d")
    (cd "$scratch" && apt_of "$release" update && apt_of "$release" download "$@")
    for package in "$scratch"/*.deb; do dpkg-deb -x "$package" "$target"; done
    rm -rf "$scratch"
}

programs() {
    local missing=()
    for program in runc iptables mmdebstrap; do command -v "$program" >/dev/null || missing+=("$program"); done
    if ((${#missing[@]})); then
        say "installing ${missing[*]}"
        apt-get -qq update >&2
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >&2
    fi
    if [[ ! -x $d/docker/usr/sbin/dockerd ]]; then
        say "unpacking Debian's docker.io"
        unpack docker "$suite" docker.io containerd tini
    fi
    if [[ ! -x $d/config/cli-plugins/docker-compose ]]; then
        say "unpacking docker-compose"
        unpack compose "$plugins" docker-compose
        mkdir -p "$d/config/cli-plugins"
        cp "$d"/compose/usr/libexec/docker/cli-plugins/docker-compose "$d/config/cli-plugins/"
        echo '{}' >"$d/config/config.json"
    fi
}

engine() {
    cat >"$d/daemon.json" <<EOF
{"data-root": "$d/data", "exec-root": "$d/run", "pidfile": "$d/docker.pid", "hosts": ["unix://$d/docker.sock"],
 "bip": "10.213.0.1/24", "default-address-pools": [{"base": "10.214.0.0/16", "size": 24}],
 "init-path": "$d/docker/usr/bin/tini-static", "log-level": "warn"}
EOF
    setsid "$d/docker/usr/sbin/dockerd" --config-file "$d/daemon.json" >"$d/dockerd.log" 2>&1 </dev/null &
    for _ in $(seq 300); do
        docker version >/dev/null 2>&1 && return
        sleep 0.2
    done
    say "dockerd does not answer:"
    tail -n 20 "$d/dockerd.log" >&2
    exit 1
}

wheels() { # what the locks name, for the Python of the base image, which is of the same minor version
    local python=$1
    mkdir -p "$d/wheels"
    cat "$root"/requirements/image-*.txt | grep -v '^#' | sort -u >"$d/wanted.txt"
    if ! cmp -s "$d/wanted.txt" "$d/wheels/wanted.txt"; then
        say "fetching Python packages"
        "$python" -m pip download -q --no-deps --disable-pip-version-check -d "$d/wheels" -r "$d/wanted.txt" >&2 ||
            "$python" -m pip download -q --no-deps --disable-pip-version-check -d "$d/wheels" -r "$d/wanted.txt" \
                --extra-index-url https://download.pytorch.org/whl/cpu >&2
        cp "$d/wanted.txt" "$d/wheels/wanted.txt"
    fi
    setsid python3 -m http.server --bind 127.0.0.1 --directory "$d/wheels" 18213 >/dev/null 2>&1 </dev/null &
    echo $! >"$d/wheels.pid"
}

base() { # NAME PACKAGES: a Debian as an image
    docker image inspect "$1" >/dev/null 2>&1 && return
    say "making the image $1"
    mmdebstrap --quiet --variant=minbase --include="$2" "$suite" "$d/base.tar" >&2
    docker import --change 'ENV PIP_FIND_LINKS=http://127.0.0.1:18213/ PIP_NO_INDEX=1' "$d/base.tar" "$1" >/dev/null
    rm -f "$d/base.tar"
}

case $mode in
    stop) stop ;;
    start)
        stop
        programs
        export PATH=$d/docker/usr/bin:$d/docker/usr/sbin:$PATH DOCKER_HOST=unix://$d/docker.sock DOCKER_CONFIG=$d/config
        keep_forwarding
        engine
        wheels "$3"
        base localhost/headrace-base:python ca-certificates,python3,python3-venv
        base localhost/headrace-base:redis ca-certificates,redis-server
        cat <<EOF
export PATH=$d/docker/usr/bin:\$PATH DOCKER_HOST=unix://$d/docker.sock DOCKER_CONFIG=$d/config
export HEADRACE_PYTHON_IMAGE=localhost/headrace-base:python HEADRACE_REDIS_IMAGE=localhost/headrace-base:redis
export HEADRACE_BUILD_NETWORK=host
EOF
        ;;
    *) say "unknown mode $mode" && exit 2 ;;
esac
