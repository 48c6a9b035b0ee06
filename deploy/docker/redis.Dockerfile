# Redis configured for headrace: one user per service, append-only file, no eviction. Valkey >= 7.2 or Redis >= 7.0.
#
#     docker build -f deploy/docker/redis.Dockerfile -t headrace-redis:0.1.0 .
ARG BASE=valkey/valkey:8.1-alpine
FROM ${BASE}
USER 0:0
COPY deploy/redis/redis.conf deploy/redis/users.acl.template deploy/redis/start.sh deploy/redis/health.sh /etc/headrace/
# Numeric ids work on Alpine and Debian without creating a user.
RUN mkdir -p /data /run/redis && chown 10001:10001 /data /run/redis && chmod 700 /data
WORKDIR /data
EXPOSE 6379
# Redis reads its file before it answers, which may take minutes. The start period ends with the first success.
HEALTHCHECK --interval=5s --timeout=4s --start-period=10m --retries=3 CMD ["/etc/headrace/health.sh"]
ENTRYPOINT ["/etc/headrace/start.sh"]
CMD []
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="headrace redis" \
      org.opencontainers.image.description="Valkey or Redis with headrace's users and durability" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
