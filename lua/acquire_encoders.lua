-- acquire_encoders: give each media item of a request an encoder by the policy above, and count it there.
--
-- A frame: app/store/scripts.py puts one file of lua/policies/encoders/ before it and names the
-- result acquire_encoders_<policy>. All items of a request are assigned in one step, so the
-- assignments of all requests, workers and hosts form one sequence.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> this worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  version            STRING registry version
-- KEYS[5]  encoder_cursor     STRING position of the next item, below the number of encoders
-- KEYS[6]  encoder_credit     HASH   url -> what smooth weighted round robin owes it
-- KEYS[7]  nodes              SET    node URLs
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over
-- ARGV[3]  version            of the snapshot the encoders come from; '' = whatever it is now
-- ARGV[4]  items              how many, at least one
-- ARGV[5+] size, url, ..., speed, ...   how many ready encoders, at least one; all their urls in registration
--          order, then all their speeds
-- RETURN   {code, version, start, index, ...}  code: 0 taken, 1 not a member (restate first), 2 snapshot
--          is not current (refresh first); start: cursor before this call; one index (from 1) per item
-- COST     O(items * encoders) CALLER app/store/ledger.py
local unfinished, ledger, sessions, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local cursor_key, credit_key, registered = KEYS[5], KEYS[6], KEYS[7]
local worker, generation, version, items = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local FIRST = 5

local current = redis.call('GET', version_key) or '0'
if redis.call('HGET', sessions, worker) ~= generation then
    return { 1, tonumber(current) or 0 }
end
if version ~= '' and version ~= current then
    return { 2, tonumber(current) or 0 }
end

local nodes = {}
local size = tonumber(ARGV[FIRST])
for i = FIRST + 1, FIRST + size do
    local url = ARGV[i]
    nodes[#nodes + 1] = {
        url = url,
        speed = tonumber(ARGV[i + size]),
        unfinished = READS_UNFINISHED and tonumber(redis.call('HGET', unfinished, url) or '0') or 0,
        credit = KEEPS_CREDIT and tonumber(redis.call('HGET', credit_key, url) or '0') or 0,
    }
end
-- Whatever somebody may have written there, infinity too: a position is needed, and every one is as good.
local start = math.floor(tonumber(redis.call('GET', cursor_key) or '0') or 0) % #nodes
start = start >= 0 and start or 0
local reply = { 0, tonumber(current) or 0, start }
for item = 1, items do
    reply[3 + item] = assign(nodes, start, item)
end
if MOVES_CURSOR then
    redis.call('SET', cursor_key, (start + items) % #nodes)
end
if KEEPS_CREDIT then
    for i = 1, #nodes do
        redis.call('HSET', credit_key, nodes[i].url, string.format('%.17g', nodes[i].credit))
    end
    -- Encoders of other models, and those that are down, keep what they are owed; removed ones don't.
    local owed = redis.call('HKEYS', credit_key)
    for i = 1, #owed do
        if redis.call('SISMEMBER', registered, owed[i]) == 0 then
            redis.call('HDEL', credit_key, owed[i])
        end
    end
end
-- Counts are restated after a restart: replicas hear of them, the append-only file does not.
redis.set_repl(redis.REPL_REPLICA)
for item = 1, items do
    local url = nodes[reply[3 + item]].url
    redis.call('HINCRBY', unfinished, url, 1)
    redis.call('HINCRBY', ledger, url, 1)
end
return reply
