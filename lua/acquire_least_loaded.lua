-- acquire_least_loaded: as acquire with min_expected_latency, for large fleets: the node of least load is read from
-- ordered sets instead of being looked for.
--
-- The sets are right as long as everybody who changes a count changes them too, or takes `load_index` away: then
-- whoever asks next gets code 6 and orders the loads anew (index_loads.lua).
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> this worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  version            STRING registry version
-- KEYS[5]  load_index         STRING name of the groups that load:<group> are
-- KEYS[6+] load:<group>       ZSET   <speed> <url> -> unfinished / speed; those of the first pool, of the second, ...
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over
-- ARGV[3]  version            of the snapshot the groups come from
-- ARGV[4]  order              name of the groups: a registry version and a digest
-- ARGV[5+] groups, draw       per pool: how many of KEYS[6+] are its, at least one; a number in [0, 1) for ties
-- RETURN   {code, version, member, ...}  code: 0 taken (member: <speed> <url>, for each pool), 1 not a member
--          (restate first), 2 snapshot is not current (refresh first), 6 loads are not ordered (order them first)
-- COST     O(groups * log(nodes)) CALLER app/store/ledger.py
local unfinished, ledger, sessions, version_key, load_index = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, generation, version, order = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local FIRST, FIRST_GROUP = 5, 6

local at_once = redis.call('MGET', version_key, load_index)
local current, ordered = at_once[1] or '0', at_once[2]
if redis.call('HGET', sessions, worker) ~= generation then
    return { 1, tonumber(current) or 0 }
end
if version ~= current then
    return { 2, tonumber(current) or 0 }
end
if ordered ~= order then
    return { 6, tonumber(current) or 0 }
end

-- The key and the member of the least load; ties over all groups by draw.
local function least_of(first, last, draw)
    local least, tied, ties = math.huge, 0, {}
    for group = first, last do
        local two = redis.call('ZRANGE', KEYS[group], 0, 1, 'WITHSCORES')
        if not two[2] then
            return nil
        end
        local score = tonumber(two[2])
        if score <= least then
            if score < least then
                least, tied, ties = score, 0, {}
            end
            -- Counted only where there are several: most often one node alone, or very many, have the least.
            local count = two[4] == two[2] and redis.call('ZCOUNT', KEYS[group], two[2], two[2]) or 1
            tied = tied + count
            ties[#ties + 1] = { group, count, two[1] }
        end
    end
    local left = math.floor(draw * tied)
    for i = 1, #ties do
        local group, count = ties[i][1], ties[i][2]
        if left < count then
            return group, left == 0 and ties[i][3] or redis.call('ZRANGE', KEYS[group], left, left)[1], least
        end
        left = left - count
    end
end

local chosen = {}
local group = FIRST_GROUP
for at = FIRST, #ARGV, 2 do
    local last = group + tonumber(ARGV[at]) - 1
    local key, member, load = least_of(group, last, tonumber(ARGV[at + 1]))
    if not key then
        -- No group is empty: somebody took it away.
        redis.call('DEL', load_index)
        return { 6, tonumber(current) or 0 }
    end
    chosen[#chosen + 1] = { key, member, load }
    group = last + 1
end

-- Counts are restated after a restart: replicas hear of them, the append-only file does not.
redis.set_repl(redis.REPL_REPLICA)
local reply = { 0, tonumber(current) or 0 }
for i = 1, #chosen do
    local key, member, load = chosen[i][1], chosen[i][2], chosen[i][3]
    local speed, url = string.match(member, '^(%S+) (.+)$')
    local count = redis.call('HINCRBY', unfinished, url, 1)
    redis.call('HINCRBY', ledger, url, 1)
    redis.call('ZADD', KEYS[key], count / speed, member)
    if (count - 1) / speed ~= load then
        -- Somebody changed a count and not its place.
        redis.call('DEL', load_index)
    end
    reply[#reply + 1] = member
end
return reply
