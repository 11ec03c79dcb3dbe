-- acquire_least_loaded: as acquire with min_expected_latency or least_expected_delay, for large fleets: the node of
-- least load is read from ordered sets instead of being looked for.
--
-- The sets are right as long as everybody who changes a count or a learned speed changes them too, or takes
-- `load_index` away: then whoever asks next gets code 6 and orders the loads anew (index_loads.lua).
--
-- By learned speeds a load is (unfinished + 1) / learned, and a node that is not learned stands before all others, by
-- -speed / (unfinished + 1): so the read of the least says whether there are such, and which of them is the best. What
-- it counts for follows from `load_sums`, as in policies/least_expected_delay.lua, whose twin tells of the chances.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> this worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  version            STRING registry version
-- KEYS[5]  load_index         STRING name of the groups that load:<group> are
-- KEYS[6+] load:<group>       ZSET   <speed> <url> -> load; those of the first pool, of the second, ...
--                             By learned speeds, behind them: `learned` HASH, url -> learned speed, and `load_sums`
--                             HASH, load:<group> -> sum of learned / speed over its learned nodes
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over
-- ARGV[3]  version            of the snapshot the groups come from
-- ARGV[4]  order              name of the groups: a registry version and a digest
-- ARGV[5]  by                 'given': the operator's speeds; 'learned': the learned ones
-- ARGV[6+] groups, draw       per pool: how many of KEYS[6+] are its, at least one; a number in [0, 1) for ties; by
--                             learned speeds a third, such a number for whether to explore
-- RETURN   {code, version, member, ...}  code: 0 taken (member: <speed> <url>, for each pool), 1 not a member
--          (restate first), 2 snapshot is not current (refresh first), 6 loads are not ordered (order them first)
-- COST     O(groups * log(nodes)); by learned speeds O(nodes) once in 200, and O(nodes not learned) once in 10
--                             CALLER app/store/ledger.py
local unfinished, ledger, sessions, version_key, load_index = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, generation, version, order = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local by_learned, learned, sums = ARGV[5] == 'learned', KEYS[#KEYS - 1], KEYS[#KEYS]
local FIRST, FIRST_GROUP = 6, 6

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

-- The key, the member and the score of the least; ties over all groups by draw. `before`: how many of a group to pass.
local function least_of(first, last, draw, before)
    local least, tied, ties = math.huge, 0, {}
    for group = first, last do
        local passed = before and before[group] or 0
        local two = redis.call('ZRANGE', KEYS[group], passed, passed + 1, 'WITHSCORES')
        local score = tonumber(two[2] or nil)
        if not score and passed == 0 then
            return nil
        end
        if score and score <= least then
            if score < least then
                least, tied, ties = score, 0, {}
            end
            -- Counted only where there are several: most often one node alone, or very many, have the least.
            local count = two[4] == two[2] and redis.call('ZCOUNT', KEYS[group], two[2], two[2]) or 1
            tied = tied + count
            ties[#ties + 1] = { group, count, two[1], passed }
        end
    end
    local left = math.floor(draw * tied)
    for i = 1, #ties do
        local group, count, rank = ties[i][1], ties[i][2], ties[i][4] + left
        if left < count then
            return group, left == 0 and ties[i][3] or redis.call('ZRANGE', KEYS[group], rank, rank)[1], least
        end
        left = left - count
    end
end

-- Made only where they are wanted: to make them is a tenth of what an acquire by given speeds costs.
local choose
if by_learned then
    local EXPLORE_NEW, EXPLORE_IDLE, CAUTION, MANY = 0.1, 0.005, 0.9, 32

    -- The same of the nodes that idle: of any of them, or of those that are not learned. Nothing where there is none.
    local function idle_of(first, last, draw, anyone)
        local idle, counts = {}, nil
        for group = first, last do
            local members = redis.call('ZRANGEBYSCORE', KEYS[group], '-inf', anyone and '+inf' or '(0')
            if #members > MANY and not counts then
                local all = redis.call('HGETALL', unfinished)
                counts = {}
                for i = 1, #all, 2 do
                    counts[all[i]] = all[i + 1]
                end
            end
            for i = 1, #members do
                local url = string.match(members[i], ' (.+)$')
                local count = counts and counts[url] or not counts and redis.call('HGET', unfinished, url)
                if tonumber(count or 0) == 0 then
                    idle[#idle + 1] = { group, members[i] }
                end
            end
        end
        if #idle > 0 then
            local group, member = unpack(idle[math.floor(draw * #idle) + 1])
            return group, member, tonumber(redis.call('ZSCORE', KEYS[group], member))
        end
    end

    -- The same of all, where the best of those that are not learned is known: `new`, its key, member and score.
    local function least_of_both(first, last, draw, new)
        local nodes, known, sum, before = 0, 0, 0, {}
        for group = first, last do
            local size = redis.call('ZCARD', KEYS[group])
            before[group] = redis.call('ZCOUNT', KEYS[group], '-inf', '(0')
            nodes, known = nodes + size, known + size - before[group]
            sum = sum + (tonumber(redis.call('HGET', sums, KEYS[group]) or nil) or 0)
        end
        if known == 0 then
            return unpack(new)
        end
        local unit = sum / known * (1 - CAUTION * known / nodes)
        local group, member, least = least_of(first, last, draw, before)
        if least <= -1 / (unit * new[3]) then
            return group, member, least
        end
        return unpack(new)
    end

    choose = function(first, last, draw, chance)
        local group, member, least = least_of(first, last, draw)
        if not group then
            return nil
        end
        if chance < EXPLORE_IDLE or (chance < EXPLORE_NEW and least < 0) then
            local idle, its_member, its_load = idle_of(first, last, draw, chance < EXPLORE_IDLE)
            if idle then
                return idle, its_member, its_load
            end
        end
        if least < 0 then
            return least_of_both(first, last, draw, { group, member, least })
        end
        return group, member, least
    end
end

local chosen = {}
local group = FIRST_GROUP
for at = FIRST, #ARGV, by_learned and 3 or 2 do
    local last, draw = group + tonumber(ARGV[at]) - 1, tonumber(ARGV[at + 1])
    local key, member, load
    if by_learned then
        key, member, load = choose(group, last, draw, tonumber(ARGV[at + 2]))
    else
        key, member, load = least_of(group, last, draw)
    end
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
    local now, before = count / speed, (count - 1) / speed
    if by_learned then
        local own = tonumber(redis.call('HGET', learned, url) or nil)
        if own and own > 0 then
            now, before = (count + 1) / own, count / own
        else
            now, before = -speed / (count + 1), -speed / count
        end
    end
    redis.call('ZADD', KEYS[key], now, member)
    if before ~= load then
        -- Somebody changed a count or a speed and not its place.
        redis.call('DEL', load_index)
    end
    reply[#reply + 1] = member
end
return reply
