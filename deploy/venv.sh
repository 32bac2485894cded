# Sourced by quickstart.sh and test.sh, from the repository's root: makes .venv and installs into it, once.
# A stamp in .venv says what was installed from which pins; while it matches, nothing is downloaded or resolved.

prfaas_python() {
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "prfaas needs Python 3.11 or newer with its venv module (on Debian: python3 and python3-venv);" >&2
    echo "set PYTHON to its path if it is not on PATH" >&2
    return 1
}

# prfaas_install EXTRAS: e.g. engine,gguf
prfaas_install() {
    pins=$(cat pyproject.toml deploy/constraints.txt | cksum)
    wanted="$1 $pins $PWD"
    if [ -x .venv/bin/prfaas ] && [ "$(cat ".venv/prfaas-$1.stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    python=$(prfaas_python) || return 1
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "making .venv with $python" >&2
        "$python" -m venv --clear .venv || return 1
    fi
    echo "installing prfaas[$1] into .venv (the first time downloads about 300 MB)" >&2
    .venv/bin/python -m pip install --disable-pip-version-check --constraint deploy/constraints.txt \
        --editable ".[$1]" >&2 || return 1
    printf '%s' "$wanted" >".venv/prfaas-$1.stamp"
}
