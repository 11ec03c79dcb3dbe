-- acquire: choose a node of each pool by the policy above and count one request on each.
--
-- A frame: app/store/scripts.py puts lua/parts/give_back.lua and one file of lua/policies/ before it and names the
-- result acquire_<policy>. So each policy stands once, and the counting stands once. One pool for a request that
-- one node serves; two for prefill and decode, so that a request holds its pair from one moment on. What a worker has
-- to say in one turn of its event loop can be one call: what it gives back, then all its acquires. It ends as single
-- calls in this order would, but what they have in common is sent and read once, and a count is written once.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> this worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  version            STRING registry version
-- KEYS[5]  latency_mean       HASH   url -> mean of the latency window, seconds
-- KEYS[6]  explored           HASH   url -> explorations since its last success
-- KEYS[7]  load_index         STRING name of the groups that load:<group> are; taken away
-- KEYS[8+] learned            HASH   url -> learned speed; for a policy that reads it, and behind it `learned_since`
--                             STRING, since when that is as it is: whoever changes it takes this away. The last one,
--                             where something is given back: `failures` HASH, url -> failures in a row
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over
-- ARGV[3]  version            of the snapshot the candidates come from; '' = whatever it is now
-- ARGV[4+] size, url, ..., speed, ..., draw, draw   per pool: how many candidates, at least one; all their
--          urls, then all their speeds; two numbers in [0, 1), for ties and weights and for whether to explore.
--          0, more, draw, draw, ...   behind a pool: so many requests more want it, two draws for each.
--          -urls, answered, url, ..., requests, ...   before the pools: to be given back, of so many urls; all of
--          them, then how many requests of each; the first `answered` answered, and not that they can't serve: their
--          rows of failures end.
--          Before all that, for a policy that reads learned speeds: since; then the speeds are what was learned,
--          as a reply has told of that time; '' = they are the operator's
-- RETURN   {code, version, index, ...}  code: 0 taken (index: candidate, from 1, for each pool and request; behind them
--          {since, speed, ...} of all pools where all are learned and these had to be read), 1 not a member (restate
--          first; nothing was given back), 2 snapshot is not current (refresh first), 7 the speeds are not those of
--          now, and a node has none (send the operator's). Where something was to be given back, the last but with 1:
--          how many requests of it had not been counted (restate)
-- COST     O(candidates)      CALLER app/store/way.py
local unfinished, ledger, sessions, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local latency_mean, explored, load_index = KEYS[5], KEYS[6], KEYS[7]
local worker, generation, version = ARGV[1], ARGV[2], ARGV[3]
local FIRST, LEARNED, LEARNED_SINCE, MANY, TRUSTED_MS = 4, 8, 9, 32, 1000
local learned, learned_since, since, pools = KEYS[LEARNED], KEYS[LEARNED_SINCE], '', FIRST
local failures = KEYS[#KEYS]
if READS_LEARNED then
    since, pools = ARGV[FIRST], FIRST + 1
end

local at_once = READS_LEARNED and redis.call('MGET', version_key, load_index, learned_since)
    or redis.call('MGET', version_key, load_index)
local current, ordered, named = at_once[1] or '0', at_once[2], at_once[3]
if redis.call('HGET', sessions, worker) ~= generation then
    return { 1, tonumber(current) or 0 }
end

-- Counts are restated after a restart: replicas hear of them, the append-only file does not.
local missed
local urls = -tonumber(ARGV[pools])
if urls > 0 then
    local answered, first, given = tonumber(ARGV[pools + 1]), pools + 2, false
    if answered > 0 then
        redis.call('HDEL', failures, unpack(ARGV, first, first + answered - 1))
    end
    redis.set_repl(redis.REPL_REPLICA)
    missed = 0
    for i = first, first + urls - 1 do
        local not_counted, running = give_back(unfinished, ledger, ARGV[i], tonumber(ARGV[i + urls]))
        missed, given = missed + not_counted, given or running
    end
    if ordered and given then
        redis.call('DEL', load_index)
        ordered = false
    end
    pools = first + 2 * urls
end
if version ~= current and version ~= '' then
    return { 2, tonumber(current) or 0, missed }
end

-- What stands at `key` for `size` urls from ARGV[first] on; nothing where the policy does not read it. `whole`: of a
-- large pool by way of all that stands there, as a hash of that size is a list that HMGET goes through for each url.
local function read(key, wanted, first, size, whole)
    if not wanted then
        return nil
    elseif whole and size > MANY then
        local all, by, values = redis.call('HGETALL', key), {}, {}
        for i = 1, #all, 2 do
            by[all[i]] = all[i + 1]
        end
        for i = 1, size do
            values[i] = by[ARGV[first + i - 1]]
        end
        return values
    elseif size <= 500 then
        return redis.call('HMGET', key, unpack(ARGV, first, first + size - 1))
    end
    -- 500 at a time: unpack() has a limit of its own, and a fleet may be larger than it.
    local values = {}
    for at = first, first + size - 1, 500 do
        local some = redis.call('HMGET', key, unpack(ARGV, at, math.min(at + 499, first + size - 1)))
        for i = 1, #some do
            values[#values + 1] = some[i]
        end
    end
    return values
end

-- What was learned is among the arguments where it is still that: to read it would cost as much again as the counts.
local found, told
if READS_LEARNED and pools <= #ARGV and (since == '' or since ~= named) then
    local at, whole = pools, true
    found = {}
    while at <= #ARGV do
        local size = tonumber(ARGV[at])
        if size > 0 then
            local speeds = read(learned, true, at + 1, size, true)
            for i = 1, size do
                whole = whole and speeds[i]
            end
            found[at] = speeds
            at = at + 2 * size + 3
        else
            at = at + 2 * tonumber(ARGV[at + 1]) + 2
        end
    end
    if not whole and since ~= '' then
        return { 7, tonumber(current) or 0, missed }
    end
    told = whole and {} or nil
end

redis.set_repl(redis.REPL_REPLICA)
if ordered and pools <= #ARGV then
    redis.call('DEL', load_index)
end
if told then
    if not named then
        -- A time that comes once: after a loss too, nothing else that was learned has had this name.
        local now = redis.call('TIME')
        named = string.format('%s%06d', now[1], now[2])
        -- Not for ever: somebody may edit `learned` by hand.
        redis.call('SET', learned_since, named, 'PX', TRUSTED_MS)
    end
    told[1] = named
end

local reply = { 0, tonumber(current) or 0 }
local at = pools
while at <= #ARGV do
    local size = tonumber(ARGV[at])
    local urls, before, draws = at, at + size, at + 2 * size + 1
    local counts = read(unfinished, READS_UNFINISHED, urls + 1, size)
    local means = read(latency_mean, READS_LATENCY, urls + 1, size)
    local tries = read(explored, READS_LATENCY, urls + 1, size)
    local speeds, by, skip = ARGV, found and found[at] or ARGV, found and 0 or before
    for i = 1, told and size or 0 do
        told[#told + 1] = by[i]
    end
    local more, taken = 0, nil
    if ARGV[draws + 2] == '0' then
        -- Several look at the same: as numbers, so that it is read as such once. What is none is an error as ever.
        more, taken, speeds = tonumber(ARGV[draws + 3]), {}, {}
        local own = {}
        for i = 1, size do
            local speed, count = by[skip + i], counts and counts[i]
            speeds[i] = tonumber(ARGV[before + i])
            own[i] = speed and (tonumber(speed) or speed)
            if count then
                counts[i] = tonumber(count) or count
            end
        end
        by, skip, before = own, 0, 0
    end
    local index, exploring, requests
    at = draws
    for nth = 0, more do
        local draw, chance = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
        index, exploring = choose(size, speeds, before, counts, means, tries, draw, chance, by, skip)
        reply[#reply + 1] = index
        if exploring then
            redis.call('HINCRBY', explored, ARGV[urls + index], 1)
        end
        if taken then
            -- The next one sees it.
            taken[index] = (taken[index] or 0) + 1
            if counts then
                counts[index] = (counts[index] or 0) + 1
            end
            if exploring and tries then
                tries[index] = (tries[index] or 0) + 1
            end
        end
        at = at + (taken and nth == 0 and 4 or 2)
    end
    requests = 1
    if taken then
        index, requests = next(taken)
    end
    while index do
        local url = ARGV[urls + index]
        redis.call('HINCRBY', unfinished, url, requests)
        redis.call('HINCRBY', ledger, url, requests)
        if taken then
            index, requests = next(taken, index)
        else
            index = nil
        end
    end
end
if told then
    table.insert(reply, told)
end
if missed then
    table.insert(reply, missed)
end
return reply
