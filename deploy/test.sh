#!/bin/sh
# Installs into .venv what the tests need and runs everything: ruff, mypy, pytest.
#   --fast   leave out what takes more than ten seconds or needs the real model
#   --slow   run only what --fast leaves out
#   --faults run the fault matrix alone: every fault under load, on real processes (needs root; --help says more)
#   --api    run schemathesis on the OpenAPI document of a live gateway (--help says more)
#   --engines  install vLLM for CPU into .venv-vllm and run only what needs it (half an hour at most)
# Anything after these goes to pytest.
set -eu
cd "$(dirname "$0")/.."
. deploy/venv.sh

only="" engines=""
case "${1:-}" in
--fast) only="not slow and not gemma" ;;
--slow) only="slow or gemma" ;;
--engines) engines=yes ;;
esac
if [ "${1:-}" = "--faults" ]; then
    shift
    prfaas_install engine,test
    export OMP_NUM_THREADS=1
    exec .venv/bin/python -m tests.faults "$@"
fi
if [ "${1:-}" = "--api" ]; then
    shift
    prfaas_install api,test
    exec .venv/bin/python -m tests.bench.schemathesis "$@"
fi
if [ -n "$only" ]; then
    shift
    set -- -m "$only" "$@"
fi

prfaas_install engine,gguf,traces,test
if [ "$only" != "not slow and not gemma" ]; then
    PRFAAS_TEST_GEMMA=$(.venv/bin/python -m deploy.gemma)
    export PRFAAS_TEST_GEMMA
fi
export OMP_NUM_THREADS=1
if [ -n "$engines" ]; then
    shift
    . deploy/vllm.sh
    prfaas_install_vllm
    prfaas_install_aiperf
    export PRFAAS_TEST_VLLM="$PWD/.venv-vllm/bin/python" PRFAAS_TEST_AIPERF="$PWD/.venv-aiperf/bin/aiperf"
    exec .venv/bin/python -m pytest -s tests/engines_vllm "$@"
fi
.venv/bin/ruff check .
.venv/bin/mypy
# Whole files go to a worker, for their stacks are shared; the long ones come first as they are listed.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
