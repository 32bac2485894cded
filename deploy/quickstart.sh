#!/bin/sh
# Installs into .venv and starts the whole path on this machine: sh deploy/quickstart.sh [options of `prfaas up`]
# The second run needs no download.
set -eu
cd "$(dirname "$0")/.."
. deploy/venv.sh
prfaas_install engine,gguf
exec .venv/bin/prfaas up "$@"
