#!/bin/sh
# Starts Redis or Valkey with one user a service, whose passwords are read from files:
#     /run/secrets/headrace/redis-password-{trainer,generator,rewarder}
# Redis is given their sha256 alone. HEADRACE_REDIS_MAXMEMORY is when it starts to refuse writes (2gb),
# HEADRACE_REDIS_DIR where the append-only file is (/data).
set -eu
umask 077

here=$(dirname "$0")
secrets=${HEADRACE_SECRETS_DIR:-/run/secrets/headrace}
users=${HEADRACE_REDIS_USERS:-/run/redis/users.acl}

fail() { echo "redis: $*" >&2; exit 2; }

rules=$(cat "$here/users.acl.template")
for user in trainer generator rewarder; do
    file=$secrets/redis-password-$user
    [ -r "$file" ] || fail "$file cannot be read; mount the password of the user $user there"
    password=$(tr -d '\r\n' <"$file")
    [ -n "$password" ] || fail "$file is empty; write the password of the user $user into it"
    hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
    rules=$(printf '%s\n' "$rules" | sed "s/@$user@/$hash/")
done
printf '%s\n' "$rules" >"$users"

server=$(command -v valkey-server || command -v redis-server) || fail "there is neither valkey-server nor redis-server"
exec "$server" "$here/redis.conf" --aclfile "$users" --dir "${HEADRACE_REDIS_DIR:-/data}" \
    --maxmemory "${HEADRACE_REDIS_MAXMEMORY:-2gb}" "$@"
