#!/bin/sh
# Whether the server answers a user of ours; while it reads its append-only file, it says LOADING.
REDISCLI_AUTH=$(tr -d '\n' </run/secrets/headrace/redis-password-trainer)
export REDISCLI_AUTH
cli=$(command -v valkey-cli || command -v redis-cli)
answer=$("$cli" --user trainer --no-auth-warning ping 2>&1)
echo "$answer"
[ "$answer" = PONG ]
