"""Scripts in Lua: each is what Redis does for a store of jobs in one step.

:mod:`mainstay_core.control_plane.job_store` says the same on values, and a test compares the two.
"""

from __future__ import annotations

COMMIT = """
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then return false end
local revision = redis.call('HINCRBY', KEYS[1], 'version', 1)
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'phase', ARGV[3], 'restored', ARGV[7])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'plan', ARGV[4], 'quorum', ARGV[5]) end
local at = 10
local function take() at = at + 1; return ARGV[at - 1] end
local last = ''
-- As many entries are kept as there is room for, if all were as long as the longest known.
local longest = math.max(1024, redis.call('HSTRLEN', KEYS[1], 'plan'))
for i = 1, tonumber(take()) do
  local kind, data = take(), take()
  longest = math.max(longest, #data)
  local kept = math.max(16, math.min(tonumber(ARGV[6]), math.floor(tonumber(ARGV[8]) / longest)))
  last = redis.call('XADD', KEYS[2], 'MAXLEN', '~', kept, '*', 'kind', kind, 'data', data)
end
for i = 1, tonumber(take()) do
  local key = take()
  redis.call('HSET', KEYS[3], key, take())
end
local kept = tonumber(ARGV[9])
if redis.call('HLEN', KEYS[3]) > kept + kept / 8 then
  local ids = redis.call('HKEYS', KEYS[3])
  table.sort(ids, function(a, b) return tonumber(a) < tonumber(b) end)
  for i = 1, #ids - kept do redis.call('HDEL', KEYS[3], ids[i]) end
end
local time = redis.call('TIME')
local now = string.format('%d%06d', time[1], time[2])
for i = 1, tonumber(take()) do redis.call('HSET', KEYS[4], take(), now) end
for i = 1, tonumber(take()) do
  local pod = take()
  redis.call('HDEL', KEYS[4], pod)
  redis.call('HDEL', KEYS[5], pod)
  redis.call('HDEL', KEYS[6], pod)
  redis.call('HDEL', KEYS[7], pod)
  redis.call('HDEL', KEYS[8], pod)
end
return {revision, last}
"""

BEAT = """
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then
  return {0, redis.call('HMGET', KEYS[1], 'quorum', 'phase', 'restored')}
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[2], ARGV[1], string.format('%d%06d', time[1], time[2]))
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
return {1, redis.call('HMGET', KEYS[1], 'quorum', 'phase', 'restored')}
"""

PUT_DOUBTS = """
if redis.call('HGET', KEYS[1], 'check') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return 1
"""

PUT_FINDINGS = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local fresh, total = {}, tonumber(redis.call('HGET', KEYS[4], 'all') or '0')
for i = 2, #ARGV, 4 do
  if redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 3]) == 1 then
    total = redis.call('HINCRBY', KEYS[4], 'all', 1)
    redis.call('ZADD', KEYS[3], total, ARGV[i])
    redis.call('HINCRBY', KEYS[4], 'verdict:' .. ARGV[i + 1], 1)
    redis.call('HINCRBY', KEYS[4], 'untold', ARGV[i + 2])
    fresh[#fresh + 1] = ARGV[i]
  end
end
local over = redis.call('ZCARD', KEYS[3]) - tonumber(ARGV[1])
if over > 0 then
  local old = redis.call('ZPOPMIN', KEYS[3], over)
  for i = 1, #old, 2 do redis.call('HDEL', KEYS[2], old[i]) end
end
return {total, fresh}
"""

CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
redis.call('HSET', KEYS[1], 'version', '1', 'state', ARGV[2], 'phase', ARGV[3],
           'manifest', ARGV[4], 'name', ARGV[5])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[5], ARGV[1])
return 1
"""

DELETE = """
local name = redis.call('HGET', KEYS[1], 'name')
if name and redis.call('HGET', KEYS[3], name) == ARGV[1] then redis.call('HDEL', KEYS[3], name) end
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('SET', KEYS[4], '1', 'EX', ARGV[2])
local known = redis.call('EXISTS', KEYS[1])
redis.call('DEL', KEYS[1], unpack(KEYS, 5))
return known
"""

LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
