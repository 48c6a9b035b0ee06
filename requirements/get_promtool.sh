#!/usr/bin/env bash
# Puts promtool, which checks and tests alert rules, into an environment: requirements/get_promtool.sh .venv
#
# It comes out of Debian's or Ubuntu's package `prometheus`, which is fetched and unpacked and not installed: no root,
# no service. Where there is no apt, nothing is done, and the tests that need it are skipped with a word about it. What
# could not be fetched is not asked for again for a day: remove VENV/no-promtool to have it tried at once.
set -euo pipefail

venv=$1
say() { printf '%s\n' "$*" >&2; }

if command -v promtool >/dev/null || [[ -x $venv/bin/promtool ]]; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    say "no promtool and no apt-get: alert rules are not tested. Put promtool (https://prometheus.io/download) on PATH"
    exit 0
fi
stamp=$venv/no-promtool
if [[ -n $(find "$stamp" -mmin -1440 2>/dev/null) ]]; then
    say "promtool could not be fetched within the last day, so alert rules are not tested; remove $stamp to try again"
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
apt=(apt-get -qq -o Dir::Cache="$scratch/cache" -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1)
fresh=("${apt[@]}" -o Dir::State::lists="$scratch/lists")

fetch() { # each line only if the one before went well: `set -e` counts for nothing where a status is asked for
    mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial" && cd "$scratch" &&
        { "${apt[@]}" download prometheus || { "${fresh[@]}" update && "${fresh[@]}" download prometheus; }; } &&
        dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool &&
        usr/bin/promtool --version
}

if ! (fetch) >>"$venv/install.log" 2>&1; then
    touch "$stamp"
    say "promtool could not be fetched, so alert rules are not tested; $venv/install.log says why"
    exit 0
fi
mv "$scratch/usr/bin/promtool" "$venv/bin/promtool"
rm -f "$stamp"
say "promtool of Debian's package prometheus is in $venv/bin"
