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
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over
-- ARGV[3]  version            of the snapshot the candidates come from; '' = whatever it is now
-- ARGV[4+] size, draw, draw, url, speed, ...  per pool: how many candidates, at least one; two numbers
--          in [0, 1), for ties and weights and for whether to explore; then each candidate
-- RETURN   {code, version, index, ...}  code: 0 taken (index: candidate, from 1, for each pool), 1 not a
--          member (restate first), 2 snapshot is not current (refresh first)
-- COST     O(candidates)      CALLER app/store/ledger.py
local unfinished, ledger, sessions, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local latency_mean, explored = KEYS[5], KEYS[6]
local worker, generation, version = ARGV[1], ARGV[2], ARGV[3]
local FIRST = 4

local current = redis.call('GET', version_key) or '0'
if redis.call('HGET', sessions, worker) ~= generation then
    return { 1, tonumber(current) or 0 }
end
if version ~= '' and version ~= current then
    return { 2, tonumber(current) or 0 }
end

local function read_nodes(at, size)
    local urls, nodes = {}, {}
    for i = at, at + 2 * size - 2, 2 do
        urls[#urls + 1] = ARGV[i]
        nodes[#nodes + 1] = { url = ARGV[i], speed = tonumber(ARGV[i + 1]) }
    end
    -- 500 at a time: unpack() has a limit of its own, and a fleet may be larger than it.
    for first = 1, size, 500 do
        local last = math.min(first + 499, size)
        local counts = redis.call('HMGET', unfinished, unpack(urls, first, last))
        local means, tries
        if READS_LATENCY then
            means = redis.call('HMGET', latency_mean, unpack(urls, first, last))
            tries = redis.call('HMGET', explored, unpack(urls, first, last))
        end
        for i = first, last do
            local node = nodes[i]
            node.unfinished = tonumber(counts[i - first + 1] or 0)
            node.mean = means and tonumber(means[i - first + 1] or nil)
            node.explored = tries and tonumber(tries[i - first + 1] or 0)
        end
    end
    return nodes
end

local reply = { 0, tonumber(current) or 0 }
local at = FIRST
while at <= #ARGV do
    local size = tonumber(ARGV[at])
    local nodes = read_nodes(at + 3, size)
    local index, exploring = choose(nodes, { tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]) })
    local url = nodes[index].url
    redis.call('HINCRBY', unfinished, url, 1)
    redis.call('HINCRBY', ledger, url, 1)
    if exploring then
        redis.call('HINCRBY', explored, url, 1)
    end
    reply[#reply + 1] = index
    at = at + 3 + 2 * size
end
return reply
