#!/bin/sh
# Starts Redis or Valkey with one user per service. The passwords are read from files:
#     /run/secrets/headrace/redis-password-{trainer,generator,rewarder,sessions}
# Redis gets only their sha256. HEADRACE_REDIS_MAXMEMORY is the amount of memory above which it refuses writes (2gb);
# it must be less than the container's limit. HEADRACE_REDIS_DIR is the directory of the append-only file (/data).
set -eu
umask 077

here=$(dirname "$0")
secrets=${HEADRACE_SECRETS_DIR:-/run/secrets/headrace}
users=${HEADRACE_REDIS_USERS:-/run/redis/users.acl}
cgroup=${HEADRACE_CGROUP_DIR:-/sys/fs/cgroup}

fail() { echo "redis: $*" >&2; exit 2; }

rules=$(cat "$here/users.acl.template")
for user in trainer generator rewarder sessions; do
    file=$secrets/redis-password-$user
    [ -r "$file" ] || fail "$file cannot be read; mount the password of the user $user there"
    password=$(tr -d '\r\n' <"$file")
    [ -n "$password" ] || fail "$file is empty; write the password of the user $user into it"
    hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
    rules=$(printf '%s\n' "$rules" | sed "s/@$user@/$hash/")
done
printf '%s\n' "$rules" >"$users"

maxmemory=${HEADRACE_REDIS_MAXMEMORY:-2gb}
number=${maxmemory%%[!0-9]*}
case $(printf %s "${maxmemory#"$number"}" | tr A-Z a-z) in
    "" | b) unit=1 ;;
    k) unit=1000 ;; kb) unit=1024 ;;
    m) unit=1000000 ;; mb) unit=1048576 ;;
    g) unit=1000000000 ;; gb) unit=1073741824 ;;
    *) number= ;;
esac
[ -n "$number" ] || fail "HEADRACE_REDIS_MAXMEMORY is $maxmemory; write an amount such as 2gb"
# The limit of cgroup v2 or v1. Without a limit, neither file exists, or it contains "max".
limit=$(cat "$cgroup/memory.max" "$cgroup/memory/memory.limit_in_bytes" 2>/dev/null | head -n 1)
case $limit in
    "" | *[!0-9]*) ;;
    *) [ $((number * unit)) -lt "$limit" ] || fail "HEADRACE_REDIS_MAXMEMORY is $maxmemory, but this container may have" \
        "only $((limit / 1048576))mb, so it would be killed before Redis refuses a write; set it to about half of the" \
        "container's limit (HEADRACE_REDIS_MEMORY in .env, redis.resources.limits.memory of the chart), or raise the limit" ;;
esac

server=$(command -v valkey-server || command -v redis-server) || fail "there is neither valkey-server nor redis-server"
exec "$server" "$here/redis.conf" --aclfile "$users" --dir "${HEADRACE_REDIS_DIR:-/data}" \
    --maxmemory "$maxmemory" "$@"
