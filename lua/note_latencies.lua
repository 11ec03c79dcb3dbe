-- note_latencies: add latencies of answers that ended well to their nodes' windows, and note the success.
--
-- Figures, not counts: a worker sends those of a quarter of a second at once, but of each answer before its release
-- where the routing strategy decides by them.
--
-- KEYS[1]  nodes              SET    node URLs
-- KEYS[2]  latency_mean       HASH   url -> mean of the latency window, seconds
-- KEYS[3]  explored           HASH   url -> explorations since its last success
-- KEYS[4]  last_success       HASH   url -> when an answer last ended well, ms, Redis's clock
-- KEYS[5+] latency:<url>      LIST   the latency window of each node, seconds, newest first
-- ARGV[1]  window             how many latencies are kept
-- ARGV[2+] url, n, then n times latency   per node: seconds, oldest first, at most as many as are kept
-- RETURN   {code}             code: 0 noted
-- COST     O(nodes * window)  CALLER app/store/ledger.py
local nodes, latency_mean, explored, last_success = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local window = tonumber(ARGV[1])
local FIRST_WINDOW = 5

local now = redis.call('TIME')
local now_ms = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000))
local at = 2
for i = FIRST_WINDOW, #KEYS do
    local url, n = ARGV[at], tonumber(ARGV[at + 1])
    -- A removed node has no window; its late answers must not leave one behind.
    if redis.call('SISMEMBER', nodes, url) == 1 then
        local window_key = KEYS[i]
        redis.call('LPUSH', window_key, unpack(ARGV, at + 2, at + 1 + n))
        redis.call('LTRIM', window_key, 0, window - 1)
        local kept = redis.call('LRANGE', window_key, 0, window - 1)
        local sum = 0
        for j = 1, #kept do
            sum = sum + tonumber(kept[j])
        end
        redis.call('HSET', latency_mean, url, string.format('%.9f', sum / #kept))
        redis.call('HDEL', explored, url)
        redis.call('HSET', last_success, url, now_ms)
    end
    at = at + 2 + n
end
return { 0 }
