-- release: give one request's count back and record how it went.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> this worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  version            STRING registry version
-- KEYS[5]  nodes              SET    node URLs
-- KEYS[6]  latency:<url>      LIST   the latency window, seconds, newest first
-- KEYS[7]  latency_mean       HASH   url -> mean of the latency window, seconds
-- KEYS[8]  explored           HASH   url -> explorations since its last success
-- KEYS[9]  last_success       HASH   url -> when an answer last ended well, ms, Redis's clock
-- KEYS[10] failures           HASH   url -> failures in a row
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over
-- ARGV[3]  url                node
-- ARGV[4]  latency            seconds, '' where the answer did not end well
-- ARGV[5]  window             how many latencies are kept
-- ARGV[6]  answered           '1': the node answered, and not that it can't serve
-- RETURN   {code, version}    code: 0 released, 1 not a member (restate), 3 none was counted
-- COST     O(window)          CALLER app/store/ledger.py
local unfinished, ledger, sessions, version_key, nodes = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local window_key, latency_mean, explored, last_success, failures = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local worker, generation, url, latency, window = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local answered = ARGV[6] == '1'

local version = tonumber(redis.call('GET', version_key) or '0') or 0
if redis.call('HGET', sessions, worker) ~= generation then
    return { 1, version }
end

-- A removed node has no window; its late answers must not leave one behind.
if latency ~= '' and redis.call('SISMEMBER', nodes, url) == 1 then
    redis.call('LPUSH', window_key, latency)
    redis.call('LTRIM', window_key, 0, window - 1)
    local kept = redis.call('LRANGE', window_key, 0, window - 1)
    local sum = 0
    for i = 1, #kept do
        sum = sum + tonumber(kept[i])
    end
    redis.call('HSET', latency_mean, url, string.format('%.9f', sum / #kept))
    redis.call('HDEL', explored, url)
    local now = redis.call('TIME')
    redis.call('HSET', last_success, url, string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000)))
end
if answered then
    redis.call('HDEL', failures, url)
end

if tonumber(redis.call('HGET', ledger, url) or 0) <= 0 then
    return { 3, version }
end
if redis.call('HINCRBY', ledger, url, -1) <= 0 then
    redis.call('HDEL', ledger, url)
end
if redis.call('HINCRBY', unfinished, url, -1) <= 0 then
    redis.call('HDEL', unfinished, url)
end
return { 0, version }
