# The rewarder: reward functions, endpoints and, in the GPU flavour, reward models.
#
#     docker build -f deploy/docker/rewarder.Dockerfile --target gpu -t headrace-rewarder:0.1.0 .
#     docker build -f deploy/docker/rewarder.Dockerfile --target cpu -t headrace-rewarder:0.1.0-cpu .
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS packages-cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
RUN python3 -m venv /opt/venv
COPY requirements/image-rewarder.txt requirements/image-trainer.txt /tmp/
RUN --mount=type=cache,target=/root/.cache/pip /opt/venv/bin/pip install --no-deps -r /tmp/image-rewarder.txt

FROM packages-cpu AS packages-gpu
ARG TORCH=2.13.0
# The packages for reward models, in the trainer's versions.
RUN --mount=type=cache,target=/root/.cache/pip \
    grep -v '^torch==' /tmp/image-trainer.txt >/tmp/constraints.txt \
    && /opt/venv/bin/pip install -c /tmp/constraints.txt "torch==${TORCH}" transformers huggingface-hub safetensors
COPY deploy/docker/check_versions.py /tmp/
RUN /opt/venv/bin/python3 /tmp/check_versions.py "torch=${TORCH}"

FROM ${BASE} AS service
# bubblewrap is for rewards that run generated code; docs/docker-compose.md lists their other requirements.
# Its version depends on the Debian release of the base image.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin headrace \
    && mkdir -p /cache /code /hub /models /rewards /uploads \
    && chown headrace:headrace /cache /code /hub /models /rewards /uploads
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache HF_HOME=/hub \
    HEADRACE_HOST=0.0.0.0 HEADRACE_PORT=8000 HEADRACE_METRICS_PORT=9090 HEADRACE_REWARD_PATH=/rewards
COPY services/__init__.py /app/services/
COPY services/rewarder /app/services/rewarder
COPY shared /app/shared
COPY LICENSE NOTICE pyproject.toml /app/
WORKDIR /tmp
EXPOSE 8000 9090
HEALTHCHECK --interval=10s --timeout=9s --start-period=60s --retries=3 CMD ["python3", "-m", "shared.health_check"]
ENTRYPOINT ["python3", "-m", "services.rewarder"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="headrace rewarder" \
      org.opencontainers.image.description="Scores completions for headrace" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM service AS cpu
COPY --from=packages-cpu /opt/venv /opt/venv
RUN python3 -m compileall -q /app
USER 10001:10001

FROM service AS gpu
COPY --from=packages-gpu /opt/venv /opt/venv
RUN python3 -m compileall -q /app
ENV TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
