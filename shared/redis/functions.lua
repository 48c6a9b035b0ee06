#!lua name=headrace
-- Every change that must be atomic. Loaded as a Redis FUNCTION library by redis_connection.py.
--
--   admit       dataset -> prompts       once per group id, fenced by the trainer's epoch
--   readmit     the same for groups that were acked after the checkpoint from which the run resumes
--   withdraw    prompts -> nowhere       removes unsampled groups, fenced by the trainer's epoch
--   hand_off    one stream -> the next   publish downstream (first result wins), ack upstream, delete what was recorded
--   record      keeps a turn of a session, only for the consumer that still owns the group's entry
--   ack         ack and delete           fenced by the trainer's epoch
--   take_over   begins a new epoch       trainers with an older epoch are fenced
--   require     sets the version generators must hold, fenced by the trainer's epoch
--   write_run   writes fields of the run's record; a trainer's writes are fenced by its epoch
--   ask         sets the desired state of the run
--   point       sets the run that the generator fleet serves
--   list_run    adds a run to a list of runs
--   bury        a stream -> dead         only by the consumer that still owns the entry; deletes what was recorded
--   replay      dead -> the stream it died on
--   renew / alive / reclaim              leases: an entry is reclaimed if its consumer is dead, not if it is slow
--   share                                returns the number of prompts, of generators, and the required version
--
-- Times are the server's clock. A clock step can cause healthy work to be reclaimed. That costs work, never
-- correctness, because hand_off drops the second result of a group.
--
-- A full server still runs these functions (allow-oom, no-writes): ack and withdraw, which make room; take_over,
-- write_run and require, which a trainer needs before it can make room, and which overwrite; ask, point and list_run,
-- which pause, stop or start a run; bury, which moves what its reader must get past; renew, which keeps waiting
-- consumers alive; and alive, which only reads.

local function fence(epoch_key, mine)
  local current = tonumber(redis.call('GET', epoch_key) or '0')
  if current > tonumber(mine) then
    return redis.error_reply('FENCED incarnation ' .. mine .. ' was superseded by ' .. current)
  end
  return nil
end

local function gone(key)
  if redis.call('EXISTS', key) == 0 then
    return redis.error_reply('STATELOST ' .. key .. ' does not exist')
  end
  return nil
end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- keys: epoch   args: -          the new epoch
redis.register_function{function_name='headrace_take_over', flags={'allow-oom'}, callback=function(keys, args)
  return redis.call('INCRBY', keys[1], 1)
end}

-- keys: epoch prompts seen:prompts   args: epoch (group_id payload)...          the number of new groups
redis.register_function('headrace_admit_groups', function(keys, args)
  local refused = fence(keys[1], args[1]) or gone(keys[2])
  if refused then return refused end
  local admitted = 0
  for i = 2, #args, 2 do
    if redis.call('SADD', keys[3], args[i]) == 1 then
      redis.call('XADD', keys[2], '*', 'group_id', args[i], 'payload', args[i + 1])
      admitted = admitted + 1
    end
  end
  return admitted
end)

-- keys: epoch prompts seen:prompts seen:completions seen:scored   args: epoch (group_id payload)...
redis.register_function('headrace_readmit_groups', function(keys, args)
  local refused = fence(keys[1], args[1]) or gone(keys[2])
  if refused then return refused end
  for i = 2, #args, 2 do
    for k = 4, 5 do redis.call('SREM', keys[k], args[i]) end
    redis.call('SADD', keys[3], args[i])
    redis.call('XADD', keys[2], '*', 'group_id', args[i], 'payload', args[i + 1])
  end
  return (#args - 1) / 2
end)

-- keys: epoch prompts started seen:prompts sessions...   args: epoch consumer_group (entry_id group_id)...
-- Skips groups that were handed off meanwhile: they have been sampled.
redis.register_function{function_name='headrace_withdraw', flags={'allow-oom'}, callback=function(keys, args)
  local refused = fence(keys[1], args[1]) or gone(keys[2])
  if refused then return refused end
  local withdrawn = 0
  for i = 3, #args, 2 do
    if redis.call('XDEL', keys[2], args[i]) == 1 then
      redis.call('XACK', keys[2], args[2], args[i])
      redis.call('HDEL', keys[3], args[i + 1])
      redis.call('SREM', keys[4], args[i + 1])
      redis.call('DEL', keys[4 + (i - 1) / 2])
      withdrawn = withdrawn + 1
    end
  end
  return withdrawn
end}

-- keys: source destination seen:destination sessions...   args: consumer_group entry_id group_id payload
redis.register_function('headrace_hand_off', function(keys, args)
  local refused = gone(keys[1]) or gone(keys[2])
  if refused then return refused end
  local first = redis.call('SADD', keys[3], args[3])
  if first == 1 then
    redis.call('XADD', keys[2], '*', 'group_id', args[3], 'payload', args[4])
  end
  redis.call('XACK', keys[1], args[1], args[2])
  -- An entry that is gone was handed off before. The group may have been admitted again, and be recorded in another.
  if redis.call('XDEL', keys[1], args[2]) == 1 then
    for k = 4, #keys do redis.call('DEL', keys[k]) end
  end
  return first
end)

-- keys: prompts sessions   args: consumer_group consumer entry_id field payload
-- 0 if another consumer has the group, or has recorded something else there
redis.register_function('headrace_record', function(keys, args)
  local refused = gone(keys[1])
  if refused then return refused end
  if #redis.call('XPENDING', keys[1], args[1], args[3], args[3], 1, args[2]) == 0 then return 0 end
  if redis.call('HSETNX', keys[2], args[4], args[5]) == 1 then return 1 end
  return redis.call('HGET', keys[2], args[4]) == args[5] and 1 or 0
end)

-- keys: epoch stream started seen...   args: epoch consumer_group (entry_id group_id)...
-- Acked ids leave the seen sets, which bounds the sets. The trainer's ledger drops a late duplicate that slips in.
redis.register_function{function_name='headrace_ack', flags={'allow-oom'}, callback=function(keys, args)
  local refused = fence(keys[1], args[1]) or gone(keys[2])
  if refused then return refused end
  local acked = 0
  for i = 3, #args, 2 do
    redis.call('XACK', keys[2], args[2], args[i])
    acked = acked + redis.call('XDEL', keys[2], args[i])
    redis.call('HDEL', keys[3], args[i + 1])
    for k = 4, #keys do redis.call('SREM', keys[k], args[i + 1]) end
  end
  return acked
end}

-- keys: epoch required_version   args: epoch version
redis.register_function{function_name='headrace_require', flags={'allow-oom'}, callback=function(keys, args)
  local refused = fence(keys[1], args[1]) or gone(keys[1])
  if refused then return refused end
  redis.call('SET', keys[2], args[2])
  return 1
end}

-- keys: run epoch   args: epoch (field value)...     the run API is not fenced: its epoch is ''
redis.register_function{function_name='headrace_write_run', flags={'allow-oom'}, callback=function(keys, args)
  local refused = gone(keys[1])
  if args[1] ~= '' then refused = refused or fence(keys[2], args[1]) or gone(keys[2]) end
  if refused then return refused end
  for i = 2, #args, 2 do redis.call('HSET', keys[1], args[i], args[i + 1]) end
  return 1
end}

-- keys: run   args: desired          'run' also counts a request to resume
redis.register_function{function_name='headrace_ask', flags={'allow-oom'}, callback=function(keys, args)
  local refused = gone(keys[1])
  if refused then return refused end
  redis.call('HSET', keys[1], 'desired', args[1])
  if args[1] == 'run' then redis.call('HINCRBY', keys[1], 'num_resumes', 1) end
  return 1
end}

-- keys: current_run   args: run_id
redis.register_function{function_name='headrace_point', flags={'allow-oom'}, callback=function(keys, args)
  redis.call('SET', keys[1], args[1])
  return 1
end}

-- keys: list   args: run_id created_at_s
redis.register_function{function_name='headrace_list_run', flags={'allow-oom'}, callback=function(keys, args)
  return redis.call('ZADD', keys[1], args[2], args[1])
end}

-- keys: stream dead sessions...   args: consumer_group consumer entry_id group_id reason payload
redis.register_function{function_name='headrace_bury', flags={'allow-oom'}, callback=function(keys, args)
  local owner = redis.call('XPENDING', keys[1], args[1], args[3], args[3], 1, args[2])
  if #owner == 0 then return 0 end
  redis.call('XADD', keys[2], '*', 'stream', keys[1], 'group_id', args[4], 'reason', args[5], 'payload', args[6])
  redis.call('XACK', keys[1], args[1], args[3])
  redis.call('XDEL', keys[1], args[3])
  for k = 3, #keys do redis.call('DEL', keys[k]) end
  return 1
end}

-- keys: dead stream   args: dead_entry_id          moves a dead letter back to the stream where it died
redis.register_function('headrace_replay', function(keys, args)
  local found = redis.call('XRANGE', keys[1], args[1], args[1])
  if #found == 0 then return 0 end
  local refused = gone(keys[2])
  if refused then return refused end
  local fields = {}
  for i = 1, #found[1][2], 2 do fields[found[1][2][i]] = found[1][2][i + 1] end
  redis.call('XADD', keys[2], '*', 'group_id', fields['group_id'], 'payload', fields['payload'])
  redis.call('XDEL', keys[1], args[1])
  return 1
end)

-- keys: leases   args: consumer ttl_ms
redis.register_function{function_name='headrace_renew', flags={'allow-oom'}, callback=function(keys, args)
  redis.call('ZADD', keys[1], now_ms() + tonumber(args[2]), args[1])
  return 1
end}

-- keys: leases   args: -          names of the consumers whose lease has not expired
redis.register_function{function_name='headrace_alive', flags={'no-writes'}, callback=function(keys, args)
  return redis.call('ZRANGEBYSCORE', keys[1], now_ms(), '+inf')
end}

-- keys: prompts takers required_version   args: consumer_group replica ttl_ms
-- Counts this replica among those that share the prompts   -> {entries, unclaimed entries, replicas, required version}
redis.register_function('headrace_share', function(keys, args)
  local refused = gone(keys[1])
  if refused then return refused end
  local now, ttl = now_ms(), tonumber(args[3])
  -- Called often, so written seldom: every write goes into the append-only file.
  if tonumber(redis.call('ZSCORE', keys[2], args[2]) or '0') < now + ttl * 2 / 3 then
    redis.call('ZADD', keys[2], now + ttl, args[2])
  end
  redis.call('ZREMRANGEBYSCORE', keys[2], '-inf', now)
  local num_entries = redis.call('XLEN', keys[1])
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', keys[1])) do
    local group = {}
    for i = 1, #info, 2 do group[info[i]] = info[i + 1] end
    if group['name'] == args[1] then
      local num_unclaimed = math.max(0, num_entries - group['pending'])
      return {num_entries, num_unclaimed, redis.call('ZCARD', keys[2]), redis.call('GET', keys[3])}
    end
  end
  return redis.error_reply('NOGROUP ' .. keys[1] .. ' has no consumer group ' .. args[1])
end)

-- keys: stream leases   args: consumer_group consumer count      -> claimed entries, as XCLAIM returns them
redis.register_function('headrace_reclaim', function(keys, args)
  local refused = gone(keys[1])
  if refused then return refused end
  local now, left, claimed = now_ms(), tonumber(args[3]), {}
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', keys[1], args[1])) do
    local consumer = {}
    for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
    if left > 0 and consumer['name'] ~= args[2] and consumer['pending'] > 0 then
      local expiry = tonumber(redis.call('ZSCORE', keys[2], consumer['name']) or '0')
      if expiry < now then
        local ids = {}
        for _, entry in ipairs(redis.call('XPENDING', keys[1], args[1], '-', '+', left, consumer['name'])) do
          ids[#ids + 1] = entry[1]
        end
        if #ids > 0 then
          local got = redis.call('XCLAIM', keys[1], args[1], args[2], 0, unpack(ids))
          for _, entry in ipairs(got) do claimed[#claimed + 1] = entry end
          left = left - #ids
        end
      end
    end
  end
  return claimed
end)
