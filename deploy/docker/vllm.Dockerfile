# A node whose engine is vLLM for CPU, in a venv of its own beside ours. Build deploy/docker/Dockerfile first, then this:
# docker build -f deploy/docker/vllm.Dockerfile -t prfaas-vllm .
ARG PRFAAS_IMAGE=prfaas
FROM ${PRFAAS_IMAGE}
USER root
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 numactl \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/vllm
COPY deploy/venv.sh deploy/vllm.sh deploy/vllm-constraints.txt deploy/
RUN sh -ec '. deploy/venv.sh; . deploy/vllm.sh; prfaas_install_vllm; rm -rf /root/.cache'
USER 10001
WORKDIR /tmp
