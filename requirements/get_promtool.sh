#!/usr/bin/env bash
# Puts promtool, which checks and tests alert rules, into an environment: requirements/get_promtool.sh .venv
#
# It comes out of Debian's or Ubuntu's package `prometheus`, which is fetched and unpacked and not installed: no root,
# no service. Where there is no apt, nothing is done, and the tests that need it are skipped with a word about it.
set -euo pipefail

venv=$1
say() { printf '%s\n' "$*" >&2; }

if command -v promtool >/dev/null || [[ -x $venv/bin/promtool ]]; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    say "no promtool and no apt-get: alert rules are not tested. Put promtool (https://prometheus.io/download) on PATH"
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
(
    cd "$scratch"
    apt=(apt-get -qq -o Dir::Cache="$scratch/cache" -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1)
    "${apt[@]}" download prometheus ||
        { apt+=(-o Dir::State::lists="$scratch/lists") && "${apt[@]}" update && "${apt[@]}" download prometheus; }
    dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
    usr/bin/promtool --version
) >>"$venv/install.log" 2>&1 || true
if [[ ! -x $scratch/usr/bin/promtool ]]; then
    say "promtool could not be fetched, so alert rules are not tested; $venv/install.log says why"
    exit 0
fi
mv "$scratch/usr/bin/promtool" "$venv/bin/promtool"
say "promtool of Debian's package prometheus is in $venv/bin"
