#!/bin/sh
# Gives the users of users.acl their passwords, as hashes in a file in memory, and becomes the server.
set -eu
umask 077
configuration=${1:-/etc/headrace/redis}
secrets=${2:-/run/secrets/headrace}
acl=${3:-/run/headrace/users.acl}

cp "$configuration/users.acl" "$acl"
for service in trainer generator rewarder; do
    file=$secrets/redis-password-$service
    password=$(tr -d '\n' <"$file" 2>/dev/null) || password=
    if [ -z "$password" ]; then
        echo "redis: $file is missing or empty; put the password of user $service into the Secret" >&2
        exit 2
    fi
    hash=$(printf %s "$password" | sha256sum | cut -c 1-64)
    sed "s/^user $service /user $service on #$hash /" "$acl" >"$acl.next"
    mv "$acl.next" "$acl"
done
for server in valkey-server redis-server; do
    if command -v "$server" >/dev/null; then exec "$server" "$configuration/redis.conf"; fi
done
echo "redis: this image has neither valkey-server nor redis-server; name another in redis.image" >&2
exit 2
