#!/bin/sh
# Redis is healthy if it answers and has read its append-only file. The user `health` may only send PING.
export REDISCLI_AUTH=any
cli=$(command -v valkey-cli || command -v redis-cli) || exit 1
[ "$("$cli" --user health ping 2>/dev/null)" = PONG ]
