-- record_failure: count a failure of a node; after enough of them in a row its breaker opens.
--
-- KEYS[1]  node:<url>         HASH   what is known of the node
-- KEYS[2]  version            STRING registry version
-- KEYS[3]  failures           HASH   url -> failures in a row, all workers; a success deletes it
-- KEYS[4]  learned            HASH   url -> learned speed; halved, up to HALVED times in a row, until a success
-- KEYS[5]  learned_since      STRING since when `learned` is as it is; taken away with a change
-- KEYS[6]  load_index         STRING name of the groups that load:<group> are; the same
-- ARGV[1]  url                node
-- ARGV[2]  threshold          failures in a row that open a closed breaker; a half-open one opens at once
-- ARGV[3]  first              ms for which it opens; each time in a row twice as long
-- ARGV[4]  longest            ms
-- RETURN   {code, version}    code: 0 opened, 6 no such node, 8 counted
-- COST     O(1)               CALLER app/store/registry.py
local node, version_key, failures, learned = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local learned_since, load_index = KEYS[5], KEYS[6]
local url, threshold, first_ms, longest_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

-- As many as open a breaker, less one, where nobody says otherwise.
local HALVED = 4

local version = tonumber(redis.call('GET', version_key) or '0') or 0
if redis.call('EXISTS', node) == 0 then
    return { 6, version }
end
local breaker = redis.call('HGET', node, 'breaker')
local count = redis.call('HINCRBY', failures, url, 1)
-- Who fails at once has little unfinished, and would be chosen all the more.
local speed = count <= HALVED and tonumber(redis.call('HGET', learned, url) or nil)
if speed then
    redis.call('HSET', learned, url, string.format('%.4g', speed / 2))
    redis.call('DEL', learned_since, load_index)
end
if breaker == 'open' or (breaker ~= 'half_open' and count < threshold) then
    return { 8, version }
end
-- The count begins at 1 again after a success: then this opening is the first of a new row.
local before = tonumber(redis.call('HGET', node, 'breaker_opens') or '0') or 0
local opens = (breaker == 'half_open' or count > threshold) and before + 1 or 1
local now = redis.call('TIME')
local until_ms = now[1] * 1000 + math.floor(now[2] / 1000) + math.min(first_ms * 2 ^ (opens - 1), longest_ms)
redis.call('HSET', node, 'breaker', 'open', 'breaker_opens', opens, 'breaker_until_ms', string.format('%.0f', until_ms))
return { 0, redis.call('INCR', version_key) }
