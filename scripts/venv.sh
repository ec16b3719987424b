#!/bin/sh
# Makes the virtual environment that the Makefile uses: scripts/venv.sh DIRECTORY
# Takes PYTHON, or the first of python3, python3.13 … python3.10 that is new enough. Where Debian's
# python3 has no ensurepip, python3-venv is installed (as root), or what to install is said.
set -eu
directory=$1

fail() {
    echo "make: $1" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

python=$(find_python)
[ -n "$python" ] || fail "no Python 3.10 or newer found (tried ${PYTHON:-python3, python3.10 … 3.13}). \
Install one, or name it: make PYTHON=/path/to/python3"

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        fail "$python cannot make virtual environments. Install Debian's python3-venv and run make again."
    echo "make: installing python3-venv, which $python lacks"
    { apt-get update && apt-get install -y --no-install-recommends python3-venv; } >/dev/null ||
        fail "apt-get could not install python3-venv. Install it by hand and run make again."
fi
rm -rf "$directory"
"$python" -m venv "$directory"
