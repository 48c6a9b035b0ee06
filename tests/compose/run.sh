#!/usr/bin/env bash
# The tests of tests/compose that need a Docker engine: run.sh PYTHON [PYTEST ARGUMENTS]
#
# The engine is the one that DOCKER_HOST or the docker context names. Where there is none, and this is root on a Debian or
# Ubuntu machine, a private one is unpacked and started in a directory of its own (private_engine.sh), and ended at the end.
# HEADRACE_TEST_ENGINE=private insists on that, =given forbids it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1
shift

say() { printf '%s\n' "$*" >&2; }
works() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; }

if [[ ${HEADRACE_TEST_ENGINE:-} == private ]] || ! works; then
    if [[ ${HEADRACE_TEST_ENGINE:-} == given || $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        say "make test-compose: no Docker engine answers, or docker has no plugin 'compose'; nothing was tested."
        say "Start Docker Engine 20.10 or later with Compose 2.25 or later, or name one in DOCKER_HOST. As root on Debian or"
        say "Ubuntu a private engine is made, unless HEADRACE_TEST_ENGINE=given."
        exit 1
    fi
    directory=${HEADRACE_ENGINE_DIR:-/var/tmp/headrace-engine}
    say "no Docker engine answers: making a private one in $directory"
    # shellcheck source=/dev/null
    if ! settings=$("$here/private_engine.sh" start "$directory" "$python"); then
        say "make test-compose: no Docker engine answers and none could be made (see above); nothing was tested."
        exit 1
    fi
    trap '"$here/private_engine.sh" stop "$directory"' EXIT
    eval "$settings"
    works || { say "make test-compose: the private engine does not answer; see $directory/dockerd.log"; exit 1; }
fi

cd "$here/../.."
status=0
"$python" -m pytest -m engine -p no:cacheprovider --durations=0 --durations-min=5 tests/compose "$@" || status=$?
exit "$status"
