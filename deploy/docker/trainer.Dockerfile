# The trainer: run API and training ranks.
#
#     docker build -f deploy/docker/trainer.Dockerfile --target gpu -t headrace-trainer:0.1.0 .
#     docker build -f deploy/docker/trainer.Dockerfile --target cpu -t headrace-trainer:0.1.0-cpu .
#
# TORCH and NCCL are the same as in the generator's image. tests/compose/test_images.py compares the two files, and the
# build checks the installed versions.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
RUN python3 -m venv /opt/venv
COPY requirements/image-trainer.txt /tmp/

FROM packages AS packages-cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# PyPI does not have a CPU build of torch for Linux. This index is used only for torch. Leave it empty if the package
# index that pip is configured for has that build.
RUN --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' /tmp/image-trainer.txt >/tmp/torch.txt \
    && grep -v '^torch==' /tmp/image-trainer.txt >/tmp/rest.txt \
    && /opt/venv/bin/pip install --no-deps ${TORCH_CPU_INDEX:+--index-url "${TORCH_CPU_INDEX}"} -r /tmp/torch.txt \
    && /opt/venv/bin/pip install --no-deps -r /tmp/rest.txt

FROM packages AS packages-gpu
ARG TORCH=2.13.0
ARG NCCL=2.29.7
# torch with its CUDA libraries, and the packages that need a GPU, are not in any lock file. All other packages are locked.
RUN --mount=type=cache,target=/root/.cache/pip \
    grep -v '^torch==' /tmp/image-trainer.txt >/tmp/locked.txt \
    && /opt/venv/bin/pip install -c /tmp/locked.txt "torch==${TORCH}" "nvidia-nccl-cu13==${NCCL}" \
    && /opt/venv/bin/pip install --no-deps -r /tmp/locked.txt \
    && echo "torch==${TORCH}" >>/tmp/locked.txt \
    && /opt/venv/bin/pip install -c /tmp/locked.txt "bitsandbytes>=0.49" "liger-kernel>=0.6"
COPY deploy/docker/check_versions.py /tmp/
RUN /opt/venv/bin/python3 /tmp/check_versions.py "torch=${TORCH}" "nccl=${NCCL}"

FROM ${BASE} AS service
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin headrace \
    && mkdir -p /cache /code /data /hub /models /runs /uploads /weights \
    && chown headrace:headrace /cache /code /data /hub /models /runs /uploads /weights
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache HF_HOME=/hub \
    HEADRACE_HOST=0.0.0.0 HEADRACE_PORT=8000 HEADRACE_METRICS_PORT=9090 HEADRACE_RUNS_DIR=/runs
COPY services/__init__.py /app/services/
COPY services/trainer /app/services/trainer
COPY shared /app/shared
COPY LICENSE NOTICE pyproject.toml /app/
WORKDIR /tmp
EXPOSE 8000 9090
HEALTHCHECK --interval=10s --timeout=9s --start-period=60s --retries=3 CMD ["python3", "-m", "shared.health_check"]
ENTRYPOINT ["python3", "-m", "services.trainer"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="headrace trainer" \
      org.opencontainers.image.description="Run API and training ranks of headrace" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM service AS cpu
COPY --from=packages-cpu /opt/venv /opt/venv
RUN python3 -m compileall -q /app
USER 10001:10001

FROM service AS gpu
# Triton compiles the launchers of its kernels with a C compiler.
# Its version depends on the Debian release of the base image.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=packages-gpu /opt/venv /opt/venv
RUN python3 -m compileall -q /app
# Compiled kernels are loaded as libraries, which a /tmp that is noexec does not allow.
ENV TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
