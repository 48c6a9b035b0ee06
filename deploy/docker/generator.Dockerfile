# The generator: vLLM.
#
#     docker build -f deploy/docker/generator.Dockerfile --target gpu -t headrace-generator:0.1.0 .
#     docker build -f deploy/docker/generator.Dockerfile --target cpu -t headrace-generator:0.1.0-cpu .
#
# The GPU flavour is vLLM's own image with our code added, so it keeps vLLM's torch and NCCL.
ARG BASE=python:3.11.14-slim-bookworm
ARG VLLM=0.32.0
ARG GPU_BASE=vllm/vllm-openai:v${VLLM}

FROM ${BASE} AS packages-cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
RUN python3 -m venv /opt/venv
COPY requirements/image-generator.txt /tmp/
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# PyPI does not have a CPU build of torch for Linux. This index is used only for torch. Leave it empty if the package
# index that pip is configured for has that build.
RUN --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' /tmp/image-generator.txt >/tmp/torch.txt \
    && grep -v '^torch==' /tmp/image-generator.txt >/tmp/rest.txt \
    && /opt/venv/bin/pip install --no-deps ${TORCH_CPU_INDEX:+--index-url "${TORCH_CPU_INDEX}"} -r /tmp/torch.txt \
    && /opt/venv/bin/pip install --no-deps -r /tmp/rest.txt
ARG TORCH=2.13.0
ARG VLLM
COPY deploy/docker/check_versions.py /tmp/
RUN /opt/venv/bin/python3 /tmp/check_versions.py "torch=${TORCH}" "vllm=${VLLM}"

FROM ${BASE} AS cpu
# The only library that vLLM's CPU build needs and a slim Debian lacks.
# Its version depends on the Debian release of the base image.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin headrace \
    && mkdir -p /cache /gpu-claims /hub /models /uploads /weights \
    && chown headrace:headrace /cache /gpu-claims /hub /models /uploads /weights
COPY --from=packages-cpu /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache HF_HOME=/hub \
    HEADRACE_HOST=0.0.0.0 HEADRACE_PORT=8000 HEADRACE_METRICS_PORT=9090
COPY services/__init__.py /app/services/
COPY services/generator /app/services/generator
COPY shared /app/shared
COPY LICENSE NOTICE pyproject.toml /app/
RUN python3 -m compileall -q /app
WORKDIR /tmp
EXPOSE 8000 9090
HEALTHCHECK --interval=10s --timeout=9s --start-period=180s --retries=3 \
    CMD ["python3", "-m", "shared.health_check", "--or-waiting"]
ENTRYPOINT ["python3", "-m", "services.generator"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="headrace generator" \
      org.opencontainers.image.description="vLLM behind headrace's streams, on CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001

FROM ${GPU_BASE} AS gpu
USER 0:0
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin headrace \
    && mkdir -p /cache /gpu-claims /hub /models /uploads /weights \
    && chown headrace:headrace /cache /gpu-claims /hub /models /uploads /weights
COPY requirements/image-generator.txt deploy/docker/check_versions.py /tmp/
ARG TORCH=2.13.0
ARG NCCL=2.29.7
ARG VLLM
# The locked packages that vLLM's image lacks, without dependencies, so that vLLM's own packages cannot change;
# check_versions.py verifies this. For weight_dir: s3://, also the s3fs that fits vLLM's fsspec.
RUN --mount=type=cache,target=/root/.cache/pip \
    grep -E '^(hiredis|msgspec|pydantic-settings|redis)==' /tmp/image-generator.txt >/tmp/ours.txt \
    && python3 -m pip install --disable-pip-version-check --no-deps -r /tmp/ours.txt \
    && python3 -m pip freeze --all | grep == >/tmp/there.txt \
    && python3 -m pip install --disable-pip-version-check -c /tmp/there.txt "s3fs>=2025.3" \
    && python3 /tmp/check_versions.py "torch=${TORCH}" "nccl=${NCCL}" "vllm=${VLLM}"
# Compiled kernels are loaded as libraries, which does not work from a /tmp mounted with noexec.
ENV PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache HF_HOME=/hub TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HEADRACE_HOST=0.0.0.0 HEADRACE_PORT=8000 HEADRACE_METRICS_PORT=9090
COPY services/__init__.py /app/services/
COPY services/generator /app/services/generator
COPY shared /app/shared
COPY LICENSE NOTICE pyproject.toml /app/
# Check that every package which the entry point imports before it serves is installed.
RUN python3 -m compileall -q /app && python3 -c "import services.generator.process, services.generator.settings"
WORKDIR /tmp
EXPOSE 8000 9090
HEALTHCHECK --interval=10s --timeout=9s --start-period=300s --retries=3 \
    CMD ["python3", "-m", "shared.health_check", "--or-waiting"]
ENTRYPOINT ["python3", "-m", "services.generator"]
CMD []
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="headrace generator" \
      org.opencontainers.image.description="vLLM behind headrace's streams, on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
