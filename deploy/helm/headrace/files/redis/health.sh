#!/bin/sh
# Redis is healthy if it answers and has read its append-only file. The user `health` may only send PING.
# MISCONF means that it cannot write its file, mostly because its disk is full: services must still reach it, to wait for room.
# HeadraceRedisNotPersisting reports it.
export REDISCLI_AUTH=any
cli=$(command -v valkey-cli || command -v redis-cli) || exit 1
case $("$cli" --user health ping 2>/dev/null) in PONG | MISCONF*) ;; *) exit 1 ;; esac
