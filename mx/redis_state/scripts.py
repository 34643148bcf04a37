"""What runs inside Redis, each script whole or not at all.

`meta` has the epoch, until when it is in doubt, the number of the last commit and its token, the
number of the last entry, the MAC of the state as of a commit (`mac_of`), and by which key that is.
"""

#: Keep a commit if it follows the last one. All writes come after all checks; where Redis
#: is full it refuses the first one.
COMMIT = """
local meta, stream, documents, spared = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local hashes = {names = KEYS[5], sources = KEYS[6], gone = KEYS[7]}
local at = 0
local function take() at = at + 1; return ARGV[at] end
local function times() return tonumber(take()) end
local epoch, token, record, entries, kept, lease = take(), take(), take(), take(), take(), take()
local before, state_mac, commit_mac = take(), take(), take()
if redis.call('HGET', meta, 'epoch') ~= epoch then return {'changed'} end
if redis.call('HGET', meta, 'token') ~= before then return {'changed'} end
for _ = 1, times() do
  if redis.call('EXISTS', lease .. take()) == 1 then return {'alive'} end
end
local missing = {'missing'}
for _ = 1, times() do
  local digest = take()
  if redis.call('HEXISTS', documents, digest) == 0 then missing[#missing + 1] = digest end
end
if #missing > 1 then return missing end
local number = redis.call('HINCRBY', meta, 'commit', 1)
redis.call('HINCRBY', meta, 'latest', entries)
redis.call('HSET', meta, 'token', token)
for _ = 1, times() do
  local kind, key, value = take(), take(), take()
  if value == '' then
    redis.call('HDEL', hashes[kind], key)
    if kind == 'sources' then
      redis.call('DEL', lease .. key)
      redis.call('HDEL', spared, key)
    end
  else
    redis.call('HSET', hashes[kind], key, value)
  end
end
for _ = 1, times() do
  local id, ttl_ms = take(), take()
  redis.call('SET', lease .. id, '1', 'PX', ttl_ms)
end
local new_epoch, doubt, lowest = take(), take(), take()
if new_epoch ~= '' then
  redis.call('HSET', meta, 'epoch', new_epoch, 'doubt', doubt)
  if tonumber(redis.call('HGET', meta, 'latest')) < tonumber(lowest) then
    redis.call('HSET', meta, 'latest', lowest)
  end
end
if state_mac ~= '' then redis.call('HSET', meta, 'mac', state_mac, 'mac_of', token) end
-- An entry that no coordinator has added could have a later number: then the stream begins anew.
local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', '1')[1]
if last and tonumber(string.match(last[1], '^%d+')) >= number then redis.call('DEL', stream) end
redis.call('XADD', stream, 'MAXLEN', '~', kept, number .. '-0',
  'record', record, 'token', token, 'before', before, 'mac', commit_mac)
return {'kept', number}
"""

#: Keep nothing of a state that no coordinator has written, if it is still that one.
RESET = """
if (redis.call('HGET', KEYS[1], 'token') or '') ~= ARGV[1] then return 0 end
redis.call('DEL', unpack(KEYS))
return 1
"""

#: Renew leases, say so to other coordinators, ask which leases have ended, and tell the time. A
#: full Redis still extends leases that are there.
#:
#: `reached` is when a coordinator was here last, by the clock of Redis, and `clock` what was told
#: then: it never goes back, and goes no faster than the clock of the one who asks, if that was here
#: before; if Redis has lost it, it is where that one's is. Where no coordinator was here for long,
#: or the clock of Redis was set, each lease gets a full period, once: `spared` has until when, and
#: what goes on without a coordinator does not count, until the source is heard of.
EXCHANGE = """
local meta, beats, sources, spared = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local at = 0
local function take() at = at + 1; return ARGV[at] end
local function times() return tonumber(take()) end
local lease, who, said = take(), take(), take()
local lease_ms, since_ms, here_ms, most_ms = times(), times(), times(), times()
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local gap_ms = now_ms - (redis.call('HGET', meta, 'reached') or now_ms)
local step_ms = math.max(gap_ms, 0)
if since_ms >= 0 then step_ms = math.min(step_ms, since_ms) end
local clock_ms = (redis.call('HGET', meta, 'clock') or now_ms) + step_ms
if here_ms > clock_ms + 2000 then clock_ms = here_ms end
local probe = redis.pcall('HSET', meta, 'reached', now_ms, 'clock', clock_ms)
local refused = type(probe) == 'table' and probe.err or ''
local function spare(id)
  local key, until_ms = lease .. id, redis.call('HGET', spared, id)
  local left_ms = redis.call('PTTL', key)
  if gap_ms < 0 then
    if until_ms then redis.call('HSET', spared, id, until_ms + gap_ms) end
    if left_ms > lease_ms then redis.call('PEXPIRE', key, lease_ms) end
    return
  end
  until_ms = until_ms and until_ms + gap_ms - most_ms or now_ms + lease_ms
  redis.pcall('HSET', spared, id, until_ms)
  if until_ms - now_ms > math.max(left_ms, 0) then
    redis.pcall('SET', key, '1', 'PX', until_ms - now_ms)
  end
end
if math.abs(gap_ms) > most_ms then
  for _, id in ipairs(redis.call('HKEYS', sources)) do spare(id) end
end
for _ = 1, times() do
  local id, ttl_ms, late = take(), take(), take()
  local key = lease .. id
  if late ~= '' and redis.call('PTTL', key) >= tonumber(ttl_ms) then
    -- another coordinator has heard of the source since then
  elseif redis.call('PEXPIRE', key, ttl_ms) == 0 then
    redis.pcall('SET', key, '1', 'PX', ttl_ms)
  end
  if late == '' then redis.call('HDEL', spared, id) end
end
if said ~= '' then
  redis.pcall('XADD', beats, 'MAXLEN', '~', '128', '*', 'who', who, 'said', said)
end
local left = {}
for n = 1, times() do left[n] = redis.call('PTTL', lease .. take()) end
local found = redis.call('HMGET', meta, 'epoch', 'commit', 'token')
return {clock_ms, refused, found, left}
"""

#: Begin a state where there is none. The probe of an exchange is not a state.
BEGIN = """
if redis.call('HSETNX', KEYS[1], 'epoch', ARGV[1]) == 1 then
  redis.call('HSET', KEYS[1], 'version', ARGV[2], 'doubt', ARGV[3], 'commit', '0', 'latest',
    ARGV[4], 'token', ARGV[1])
  if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'mac', ARGV[5], 'mac_of', ARGV[1]) end
end
if ARGV[6] ~= '' then redis.call('HSETNX', KEYS[1], 'key', ARGV[6]) end
"""

#: Keep documents no longer, if the coordinator has seen every commit: one may name them.
FORGET = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
for n = 2, #ARGV do redis.call('HDEL', KEYS[2], ARGV[n]) end
return 1
"""
