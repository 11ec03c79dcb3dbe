-- release: give one request's count back. What is only a figure of it, note_latencies.lua writes down.
--
-- Behind lua/parts/give_back.lua. Where many are acquired and given back at a time, acquire.lua does it.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> this worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  version            STRING registry version
-- KEYS[5]  failures           HASH   url -> failures in a row
-- KEYS[6]  load_index         STRING name of the groups that load:<group> are
-- KEYS[7+] load:<group>       ZSET   <speed> <url> -> load; the node's, if it is in one; by learned speeds, behind it:
--                             `learned` HASH, url -> learned speed, and `load_sums`, which stays as it is
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over
-- ARGV[3]  url                node
-- ARGV[4]  answered           '1': the node answered, and not that it can't serve; its row of failures ends
-- ARGV[5]  order              name of the groups among which the caller looked for the node; '' = it did not
-- ARGV[6+] speed, member      of the node in its group: <speed> <url>
-- RETURN   {code, version}    code: 0 released, 1 not a member (restate), 3 none was counted
-- COST     O(1)               CALLER app/store/ledger.py
local unfinished, ledger, sessions, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local failures, load_index = KEYS[5], KEYS[6]
local worker, generation, url, answered, order = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local GROUP, LEARNED, SPEED, MEMBER = 7, 8, 6, 7

local at_once = redis.call('MGET', version_key, load_index)
local version, ordered = tonumber(at_once[1] or '0') or 0, at_once[2]
if redis.call('HGET', sessions, worker) ~= generation then
    return { 1, version }
end
if answered == '1' then
    redis.call('HDEL', failures, url)
end

-- Counts are restated after a restart: replicas hear of them, the append-only file does not.
redis.set_repl(redis.REPL_REPLICA)
local missed, running = give_back(unfinished, ledger, url, 1)
if missed > 0 then
    return { 3, version }
end
if ordered and ordered ~= order then
    redis.call('DEL', load_index)
elseif ordered and KEYS[GROUP] then
    local count, speed = math.max(running, 0), ARGV[SPEED]
    local own = KEYS[LEARNED] and tonumber(redis.call('HGET', KEYS[LEARNED], url) or nil)
    local load = count / speed
    if own and own > 0 then
        load = (count + 1) / own
    elseif KEYS[LEARNED] then
        load = -speed / (count + 1)
    end
    redis.call('ZADD', KEYS[GROUP], load, ARGV[MEMBER])
end
return { 0, version }
