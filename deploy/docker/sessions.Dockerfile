# The sessions service: turns and tools. It needs neither torch nor a GPU, so it has only one flavour.
#
#     docker build -f deploy/docker/sessions.Dockerfile --target cpu -t headrace-sessions:0.1.0-cpu .
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS packages-cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
RUN python3 -m venv /opt/venv
COPY requirements/image-sessions.txt /tmp/
RUN --mount=type=cache,target=/root/.cache/pip /opt/venv/bin/pip install --no-deps -r /tmp/image-sessions.txt

FROM ${BASE} AS service
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin headrace \
    && mkdir -p /cache /code /tools \
    && chown headrace:headrace /cache /code /tools
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    HEADRACE_HOST=0.0.0.0 HEADRACE_PORT=8000 HEADRACE_METRICS_PORT=9090 HEADRACE_TOOL_PATH=/tools
COPY services/__init__.py /app/services/
COPY services/sessions /app/services/sessions
COPY shared /app/shared
COPY LICENSE NOTICE pyproject.toml /app/
WORKDIR /tmp
EXPOSE 8000 9090
HEALTHCHECK --interval=10s --timeout=9s --start-period=60s --retries=3 CMD ["python3", "-m", "shared.health_check"]
ENTRYPOINT ["python3", "-m", "services.sessions"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="headrace sessions" \
      org.opencontainers.image.description="Plays rollouts with tools for headrace" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM service AS cpu
COPY --from=packages-cpu /opt/venv /opt/venv
RUN python3 -m compileall -q /app
USER 10001:10001
