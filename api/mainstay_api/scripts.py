"""What Redis does in one step: the scripts of :mod:`mainstay_api.store`.

A script is atomic: whatever process dies, it has happened as a whole or not at all.
"""

from __future__ import annotations

COMMIT = """
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then return false end
local version = redis.call('HINCRBY', KEYS[1], 'version', 1)
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'phase', ARGV[3], 'restored', ARGV[7])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'plan', ARGV[4], 'quorum', ARGV[5]) end
local at = 8
local function take() at = at + 1; return ARGV[at - 1] end
local last = ''
for i = 1, tonumber(take()) do
  local kind = take()
  last = redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*', 'kind', kind, 'data', take())
end
for i = 1, tonumber(take()) do
  local key = take()
  redis.call('HSET', KEYS[3], key, take())
end
local time = redis.call('TIME')
local now = string.format('%d%06d', time[1], time[2])
for i = 1, tonumber(take()) do redis.call('HSET', KEYS[4], take(), now) end
for i = 1, tonumber(take()) do
  local pod = take()
  redis.call('HDEL', KEYS[4], pod)
  redis.call('HDEL', KEYS[5], pod)
end
return {version, last}
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

CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
redis.call('HSET', KEYS[1], 'version', '1', 'state', ARGV[2], 'phase', ARGV[3],
           'manifest', ARGV[4], 'name', ARGV[5])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[5], ARGV[1])
return 1
"""

FORGET = """
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
