#!/bin/sh
# Installs into .venv what the tests need and runs them: ruff, mypy, pytest. About 15 minutes on two cores.
#   --fast     leave out what takes more than ten seconds or needs the real model
#   --slow     run only what --fast leaves out
#   --long     run only what takes half a minute or more, and is left out otherwise
#   --faults   run the fault matrix alone: every fault under load, on real processes (needs root; --help says more)
#   --api      run schemathesis on the OpenAPI document of a live gateway (--help says more)
#   --engines  install vLLM for CPU into .venv-vllm and run only what needs it (half an hour at most)
# Anything after these goes to pytest.
set -eu
cd "$(dirname "$0")/.."
. deploy/venv.sh
export OMP_NUM_THREADS=1

suite="not long"
case "${1:-}" in
--fast) suite="not slow and not gemma and not long" ;;
--slow) suite="(slow or gemma) and not long" ;;
--long) suite="long" ;;
--faults)
    shift
    prfaas_install engine,test
    exec .venv/bin/python -m tests.faults "$@"
    ;;
--api)
    shift
    prfaas_install api,test
    exec .venv/bin/python -m tests.bench.schemathesis "$@"
    ;;
--engines) suite="" ;;
*) set -- "" "$@" ;;
esac
shift

prfaas_install engine,gguf,traces,test
if [ "${suite#not slow}" = "$suite" ]; then
    PRFAAS_TEST_GEMMA=$(.venv/bin/python -m deploy.gemma)
    export PRFAAS_TEST_GEMMA
fi
if [ -z "$suite" ]; then
    . deploy/vllm.sh
    prfaas_install_vllm
    prfaas_install_aiperf
    export PRFAAS_TEST_VLLM="$PWD/.venv-vllm/bin/python" PRFAAS_TEST_AIPERF="$PWD/.venv-aiperf/bin/aiperf"
    exec .venv/bin/python -m pytest -s tests/engines_vllm "$@"
fi
.venv/bin/ruff check .
.venv/bin/mypy
# Whole files go to a worker, for their stacks are shared; the long ones come first as they are listed.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$suite" "$@"
