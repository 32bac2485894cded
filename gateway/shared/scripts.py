"""What Redis does in one step for gateways, as Lua. Times are Redis's own clock, in milliseconds.

Every script gets its keys by name, and values as strings. A replica's word holds until a time that is written with it:
who is gone by then is left out by whoever looks next.
"""

from __future__ import annotations

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""

BEAT = (
    _NOW
    + """
-- KEYS: replicas, meta   ARGV: id, record, lease ms, least term, fresh era, threshold or '', stands (0|1)
local me, lease = ARGV[1], tonumber(ARGV[3])
redis.call('HSET', KEYS[1], me, (now + lease) .. ' ' .. ARGV[2])
local live = {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    local till, record = string.match(all[i + 1], '^(%d+) (.*)$')
    if tonumber(till) < now then
        redis.call('HDEL', KEYS[1], all[i])
    else
        live[#live + 1] = all[i]
        live[#live + 1] = record
    end
end
redis.call('HSETNX', KEYS[2], 'era', ARGV[5])
local leader = redis.call('HGET', KEYS[2], 'leader') or ''
local till = tonumber(redis.call('HGET', KEYS[2], 'leader_till') or '0')
local term = tonumber(redis.call('HGET', KEYS[2], 'term') or '0')
if ARGV[7] == '0' then
    if leader == me then
        leader = ''
        redis.call('HSET', KEYS[2], 'leader', '', 'leader_till', 0)
    end
elseif leader == me or till < now then
    if leader ~= me then
        term = math.max(term, tonumber(ARGV[4])) + 1
        redis.call('HSET', KEYS[2], 'leader', me, 'term', term)
        leader = me
    end
    redis.call('HSET', KEYS[2], 'leader_till', now + lease)
end
if leader == me and ARGV[6] ~= '' then
    redis.call('HSET', KEYS[2], 'threshold', ARGV[6])
end
return {
    redis.call('HGET', KEYS[2], 'era'), redis.call('HGET', KEYS[2], 'rev') or '0', leader, term,
    redis.call('HGET', KEYS[2], 'threshold') or '', live, now
}
"""
)
"""Says that this replica lives, elects a leader where there is none, and tells who else there is."""

LEAVE = """
-- KEYS: replicas, meta   ARGV: id
redis.call('HDEL', KEYS[1], ARGV[1])
if redis.call('HGET', KEYS[2], 'leader') == ARGV[1] then
    redis.call('HSET', KEYS[2], 'leader', '', 'leader_till', 0)
end
return 1
"""
"""A replica goes in order: nobody waits until its lease is over."""

_NEWS = """
redis.pcall('XADD', KEYS[2], 'MAXLEN', '1', rev .. '-0', 'rev', rev)
"""
"""Whoever waits for a revision above the one that it has is woken."""

WRITE = (
    """
-- KEYS: meta, news, one hash of rows a table, one of removed rows a table
-- ARGV: era, revision that was read, then (table number, name, row or '') ...
if redis.call('HGET', KEYS[1], 'era') ~= ARGV[1] then return -1 end
if (redis.call('HGET', KEYS[1], 'rev') or '0') ~= ARGV[2] then return -1 end
local tables = (#KEYS - 2) / 2
for i = 3, #ARGV, 3 do
    local rows, gone = KEYS[2 + tonumber(ARGV[i])], KEYS[2 + tables + tonumber(ARGV[i])]
    if ARGV[i + 2] == '' then
        redis.call('HDEL', rows, ARGV[i + 1])
        redis.call('HSET', gone, ARGV[i + 1], '')
    else
        redis.call('HSET', rows, ARGV[i + 1], ARGV[i + 2])
        redis.call('HDEL', gone, ARGV[i + 1])
    end
end
local rev = redis.call('HINCRBY', KEYS[1], 'rev', 1)
"""
    + _NEWS
    + """
return rev
"""
)
"""Changes rows if nobody else did since they were read; the new revision, or -1."""

SEED = (
    """
-- KEYS: as of WRITE   ARGV: era, then (table number, name, row) ...
if redis.call('HGET', KEYS[1], 'era') ~= ARGV[1] then return -1 end
local tables, added = (#KEYS - 2) / 2, 0
for i = 2, #ARGV, 3 do
    local rows, gone = KEYS[2 + tonumber(ARGV[i])], KEYS[2 + tables + tonumber(ARGV[i])]
    if redis.call('HEXISTS', gone, ARGV[i + 1]) == 0 then
        added = added + redis.call('HSETNX', rows, ARGV[i + 1], ARGV[i + 2])
    end
end
if added > 0 then
    local rev = redis.call('HINCRBY', KEYS[1], 'rev', 1)
"""
    + _NEWS
    + """
end
return added
"""
)
"""Adds rows that a gateway brings along, or that an emptied Redis has lost: what is there, or was removed, stays so."""

KEEP = """
-- KEYS: list of ids, then pairs of keys, by id and by request id   ARGV: most, seconds, prefix, then (id, record) ...
for i = 4, #ARGV, 2 do
    local at = 2 + (i - 4)
    redis.call('SET', KEYS[at], ARGV[i + 1], 'EX', ARGV[2])
    redis.call('SET', KEYS[at + 1], ARGV[i], 'EX', ARGV[2])
    redis.call('LPUSH', KEYS[1], ARGV[i])
end
while redis.call('LLEN', KEYS[1]) > tonumber(ARGV[1]) do
    redis.call('DEL', ARGV[3] .. redis.call('RPOP', KEYS[1]))
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""
"""Keeps decision records, and no more than so many: the oldest go."""

SLICE = (
    _NOW
    + """
-- KEYS: one hash a holder
-- ARGV: id, ttl ms, gateways, then per holder: demand of requests, of tokens (shares of their limits, -1 without one),
--       concurrency (-1 without), slots wanted, slots in use, whether it is given back (0|1)
local me, ttl, gateways = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

-- needs holds mine first: what is mine of so much, where all that is left over is divided evenly
local function fair(needs, most)
    local sum = 0
    for _, need in ipairs(needs) do sum = sum + need end
    local mine = needs[1]
    if sum <= most then return mine + (most - sum) / gateways end
    table.sort(needs)
    local left = most
    for k, need in ipairs(needs) do
        local even = left / (#needs - k + 1)
        if need > even then return math.min(mine, even) end
        left = left - need
    end
end

local answers = {}
for i = 1, #KEYS do
    local at = 4 + (i - 1) * 6
    local requests, tokens = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
    local most, wanted, running = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
    local needs, held = {{math.max(0, requests)}, {math.max(0, tokens)}, {wanted}}, {0, 0, 0}
    local all = redis.call('HGETALL', KEYS[i])
    for j = 1, #all, 2 do
        local word = cmsgpack.unpack(all[j + 1])
        if word[1] < now then
            redis.call('HDEL', KEYS[i], all[j])
        elseif all[j] ~= me then
            for k = 1, 3 do
                held[k] = held[k] + word[1 + k]
                table.insert(needs[k], word[4 + k])
            end
        end
    end
    if ARGV[at + 5] == '1' then
        redis.call('HDEL', KEYS[i], me)
        answers[i] = {'0', '0', 0}
    else
        local mine = {0, 0, 0}
        for k, asked in ipairs({requests, tokens}) do
            if asked >= 0 then mine[k] = math.max(0, math.min(fair(needs[k], 1), 1 - held[k])) end
        end
        if most >= 0 then mine[3] = math.max(0, math.min(math.ceil(fair(needs[3], most)), most - held[3])) end
        local word = {now + ttl, mine[1], mine[2], math.max(mine[3], running),
                      math.max(0, requests), math.max(0, tokens), wanted}
        redis.call('HSET', KEYS[i], me, cmsgpack.pack(word))
        redis.call('PEXPIRE', KEYS[i], ttl)
        answers[i] = {tostring(mine[1]), tostring(mine[2]), mine[3]}
    end
end
return answers
"""
)
"""Divides limits among those who ask, so that all slices of one limit are never more than it.

Who needs little gets that, and what nobody needs is divided evenly; where there is too little, those who need more than
an even part have as much as each other. A slice grows only as far as others have given theirs back, and slots in use
count until they are free.
"""

SPEND = """
-- KEYS: totals by key, the number that this gateway said last
-- ARGV: number, seconds that it is remembered, then per key: id, total known, tokens to add ...
local seen = tonumber(redis.call('GET', KEYS[2]) or '0')
local fresh = tonumber(ARGV[1]) > seen
if fresh then redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2]) end
local totals = {}
for i = 3, #ARGV, 3 do
    local before = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0')
    local total = math.max(before, tonumber(ARGV[i + 1]))
    if fresh then total = total + tonumber(ARGV[i + 2]) end
    if total > before then redis.call('HSET', KEYS[1], ARGV[i], string.format('%.0f', total)) end
    totals[#totals + 1] = total
end
return totals
"""
"""Adds to what keys have used, once for each number, and tells what it is then."""
