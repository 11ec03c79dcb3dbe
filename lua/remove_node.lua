-- remove_node: take a node out of the registry, with its latency window; its running count stays
-- until the last of its requests has ended.
--
-- KEYS[1]  nodes              SET    node URLs
-- KEYS[2]  node:<url>         HASH   what is known of the node
-- KEYS[3]  version            STRING registry version
-- KEYS[4]  engine_keys        HASH   url -> the key sent to that engine
-- KEYS[5]  latency:<url>      LIST   the latency window, seconds, newest first
-- KEYS[6]  latency_mean       HASH   url -> mean of the latency window, seconds
-- KEYS[7]  explored           HASH   url -> explorations since its last success
-- KEYS[8]  last_success       HASH   url -> when an answer last ended well, ms
-- KEYS[9]  unfinished         HASH   url -> total over all workers
-- KEYS[10] stages:<url>       HASH   stage times of split requests
-- KEYS[11] failures           HASH   url -> failures in a row
-- KEYS[12] learned            HASH   url -> learned speed
-- KEYS[13] learning:<url>     HASH   what its learned speed is made of
-- ARGV[1]  url                node
-- ARGV[2]  when               'now'; 'drained': only a draining node with nothing running, or past
--                             its deadline; else an incarnation: only if it is still that one
-- RETURN   {code, version}    code: 0 removed, 6 was not there, 7 not yet
-- COST     O(1)               CALLER app/store/registry.py, workers/reaper.py
local nodes, node, version_key, engine_keys = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local window_key, latency_mean, explored, last_success, unfinished = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local stages, failures, learned, learning = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local url, when = ARGV[1], ARGV[2]

local version = tonumber(redis.call('GET', version_key) or '0') or 0
if redis.call('SISMEMBER', nodes, url) == 0 then
    return { 6, version }
end
if when == 'drained' then
    local now = redis.call('TIME')
    local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
    local until_ms = tonumber(redis.call('HGET', node, 'drain_until_ms') or '0')
    local running = tonumber(redis.call('HGET', unfinished, url) or '0')
    if redis.call('HGET', node, 'state') ~= 'draining' or (running > 0 and now_ms < until_ms) then
        return { 7, version }
    end
elseif when ~= 'now' and redis.call('HGET', node, 'incarnation') ~= when then
    return { 7, version }
end
-- The node itself last: a key of another type ends the script where it stands, and after healing it runs again.
version = redis.call('INCR', version_key)
redis.call('HDEL', engine_keys, url)
redis.call('HDEL', latency_mean, url)
redis.call('HDEL', explored, url)
redis.call('HDEL', last_success, url)
redis.call('HDEL', failures, url)
redis.call('HDEL', learned, url)
redis.call('DEL', node, window_key, stages, learning)
redis.call('SREM', nodes, url)
return { 0, version }
