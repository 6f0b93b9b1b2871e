# Sourced by run, test and .ci/run: makes the project's own Python environment and runs Python in it.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${FLEXTENSOR_FX_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
export FLEXTENSOR_FX_VENV=$venv # one script may start another, from another folder
# Otherwise another environment that is active here, or its packages, would be used in place of ours.
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
cd "$root"

say() { printf '== %s\n' "$*"; }

fail() { # message, what to do...
    printf 'error: %s\n' "$1" >&2
    shift
    printf '       %s\n' "$@" >&2
    exit 1
}

# prepare EXTRA...: an environment in which this project and these extras are installed. Quick when nothing changed.
prepare() {
    local stamp=$venv/installed-for-flextensor_fx state missing=() extra
    # The path is in it too: a copied tree would otherwise run the code of the tree that it was copied from.
    state="$root $(cat pyproject.toml constraints.txt | cksum)"
    [ "$(head -n 1 "$stamp" 2>/dev/null)" = "$state" ] || rm -f "$stamp"
    for extra in "$@"; do
        grep -qsx "$extra" "$stamp" || missing+=("$extra")
    done
    if [ ${#missing[@]} -eq 0 ]; then
        say "using $venv, installed before"
        return
    fi
    make_venv
    require_compiler
    install "$(IFS=,; printf '%s' "${missing[*]}")"
    [ -e "$stamp" ] || printf '%s\n' "$state" >"$stamp"
    printf '%s\n' "${missing[@]}" >>"$stamp"
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    if [ -e "$venv" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv exists, but has no working Python with pip." \
            "Remove it (or set FLEXTENSOR_FX_VENV to another place), then run this again."
    fi
    local python
    python=$(find_python) || fail "no Python 3.11, 3.12 or 3.13 on PATH." "Install one, then run this again."
    say "making $venv with $("$python" --version)"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv" # half made; there was nothing in it before
        fail "$python could not make a virtual environment." \
            "Where Python comes from the system, install its venv package (python3-venv), then run this again."
    fi
}

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

require_compiler() { # Inductor compiles C++ against Python's headers
    command -v "${CXX:-g++}" >/dev/null ||
        fail "no C++ compiler: ${CXX:-g++} is not on PATH." "Install g++, or set CXX to a compiler, then run this again."
    "$venv/bin/python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
        fail "the headers of this Python (Python.h) are not installed." \
            "Install them (python3-dev where Python comes from the system), then run this again."
}

install() { # extras, comma-separated
    local log=$venv/install.log
    say "installing flextensor_fx[$1] and what it needs, as pinned in constraints.txt (minutes the first time; log: $log)"
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --constraint constraints.txt --editable ".[$1]" 2>&1 | tee "$log" | show_progress; then
        tail -n 15 "$log" >&2
        fail "pip could not install the packages; its last lines are above, all of them in $log." \
            "If a download failed, check that pip reaches its package index, then run this again: it takes up where it stopped."
    fi
}

show_progress() { # one short line per package and per large download
    local line
    while IFS= read -r line; do
        line=${line%% (from*}
        case $line in
            Collecting*) printf '   %s\n' "${line#Collecting }" ;;
            Processing*) printf '   %s\n' "${line##*/}" ;;
            *Downloading*" MB)"*) printf '      downloading %s\n' "${line##*Downloading }" ;;
            Installing\ collected*) printf '   unpacking all of them\n' ;;
        esac
    done
}

# run_python ARGUMENT...: Python of the environment, with its programs first on PATH.
run_python() {
    # FLEXTENSOR_FX_* variables are options of the package, which refuses those that it does not know.
    env -u FLEXTENSOR_FX_VENV VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" "$venv/bin/python" "$@"
}
