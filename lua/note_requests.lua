-- note_requests: add requests that a worker has counted on nodes to those of this second, all workers together.
--
-- KEYS[1]  requests           HASH   second, Redis's clock -> requests in it
-- ARGV[1]  count              since the worker's last note
-- ARGV[2]  window             seconds
-- RETURN   {code}             code: 0 noted
-- COST     O(window)          CALLER app/store/ledger.py
local requests = KEYS[1]
local count, window = tonumber(ARGV[1]), tonumber(ARGV[2])

local now = tonumber(redis.call('TIME')[1])
local seconds = redis.call('HKEYS', requests)
for i = 1, #seconds do
    local age = now - (tonumber(seconds[i]) or 0)
    if age < 0 or age >= window then
        redis.call('HDEL', requests, seconds[i])
    end
end
redis.call('HINCRBY', requests, now, count)
-- Of a deployment that has ended nothing stays.
redis.call('EXPIRE', requests, window)
return { 0 }
