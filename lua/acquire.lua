-- acquire: choose a node of each pool by the policy above and count one request on each.
--
-- A frame: app/store/scripts.py puts one file of lua/policies/ before it and names the result
-- acquire_<policy>. So each policy stands once, and the counting stands once. One pool for a request that
-- one node serves; two for prefill and decode, so that a request holds its pair from one moment on.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> this worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  version            STRING registry version
-- KEYS[5]  latency_mean       HASH   url -> mean of the latency window, seconds
-- KEYS[6]  explored           HASH   url -> explorations since its last success
-- KEYS[7]  load_index         STRING name of the groups that load:<group> are; taken away
-- KEYS[8+] learned            HASH   url -> learned speed; for a policy that reads it, and behind it `learned_since`
--                             STRING, since when that is as it is: whoever changes it takes this away
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over
-- ARGV[3]  version            of the snapshot the candidates come from; '' = whatever it is now
-- ARGV[4+] size, url, ..., speed, ..., draw, draw   per pool: how many candidates, at least one; all their
--          urls, then all their speeds; two numbers in [0, 1), for ties and weights and for whether to explore.
--          Before all that, for a policy that reads learned speeds: since; then the speeds are what was learned,
--          as a reply has told of that time; '' = they are the operator's
-- RETURN   {code, version, index, ...}  code: 0 taken (index: candidate, from 1, for each pool; behind them {since,
--          speed, ...} of all pools where all are learned and these had to be read), 1 not a member (restate first),
--          2 snapshot is not current (refresh first), 7 the speeds are not those of now, and a node has none (send
--          the operator's)
-- COST     O(candidates)      CALLER app/store/ledger.py
local unfinished, ledger, sessions, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local latency_mean, explored, load_index = KEYS[5], KEYS[6], KEYS[7]
local worker, generation, version = ARGV[1], ARGV[2], ARGV[3]
local FIRST, LEARNED, LEARNED_SINCE, MANY, TRUSTED_MS = 4, 8, 9, 32, 1000
local learned, learned_since, since, pools = KEYS[LEARNED], KEYS[LEARNED_SINCE], '', FIRST
if READS_LEARNED then
    since, pools = ARGV[FIRST], FIRST + 1
end

local at_once = READS_LEARNED and redis.call('MGET', version_key, load_index, learned_since)
    or redis.call('MGET', version_key, load_index)
local current, ordered, named = at_once[1] or '0', at_once[2], at_once[3]
if redis.call('HGET', sessions, worker) ~= generation then
    return { 1, tonumber(current) or 0 }
end
if version ~= current and version ~= '' then
    return { 2, tonumber(current) or 0 }
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
if READS_LEARNED and (since == '' or since ~= named) then
    local at, whole = pools, true
    found = {}
    while at <= #ARGV do
        local size = tonumber(ARGV[at])
        local speeds = read(learned, true, at + 1, size, true)
        for i = 1, size do
            whole = whole and speeds[i]
        end
        found[at] = speeds
        at = at + 2 * size + 3
    end
    if not whole and since ~= '' then
        return { 7, tonumber(current) or 0 }
    end
    told = whole and {} or nil
end

-- Counts are restated after a restart: replicas hear of them, the append-only file does not.
redis.set_repl(redis.REPL_REPLICA)
if ordered then
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
    local urls, speeds, draws = at, at + size, at + 2 * size
    local counts = read(unfinished, READS_UNFINISHED, urls + 1, size)
    local means = read(latency_mean, READS_LATENCY, urls + 1, size)
    local tries = read(explored, READS_LATENCY, urls + 1, size)
    local by, skip = found and found[at] or ARGV, found and 0 or speeds
    local draw, chance = tonumber(ARGV[draws + 1]), tonumber(ARGV[draws + 2])
    local index, exploring = choose(size, ARGV, speeds, counts, means, tries, draw, chance, by, skip)
    local url = ARGV[urls + index]
    redis.call('HINCRBY', unfinished, url, 1)
    redis.call('HINCRBY', ledger, url, 1)
    if exploring then
        redis.call('HINCRBY', explored, url, 1)
    end
    reply[#reply + 1] = index
    for i = 1, told and size or 0 do
        told[#told + 1] = by[i]
    end
    at = draws + 3
end
if told then
    table.insert(reply, told)
end
return reply
