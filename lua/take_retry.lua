-- take_retry: whether the deployment can afford one more request that an engine gets a second time.
--
-- KEYS[1]  retries            HASH   second, Redis's clock -> retries in it
-- KEYS[2+] requests:<w>       STRING requests of a worker in the window
-- ARGV[1]  window             seconds
-- ARGV[2]  ratio              retries a request
-- ARGV[3]  floor              retries that are always affordable
-- RETURN   {code}             code: 0 taken, 7 it can't
-- COST     O(workers + window) CALLER app/store/budget.py
local retries = KEYS[1]
local window, ratio, floor = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local FIRST_WORKER = 2

local now = tonumber(redis.call('TIME')[1])
local taken, requests = 0, 0
local seconds = redis.call('HGETALL', retries)
for i = 1, #seconds, 2 do
    local age = now - (tonumber(seconds[i]) or 0)
    if age >= 0 and age < window then
        taken = taken + (tonumber(seconds[i + 1]) or 0)
    else
        redis.call('HDEL', retries, seconds[i])
    end
end
for i = FIRST_WORKER, #KEYS do
    requests = requests + (tonumber(redis.call('GET', KEYS[i]) or '0') or 0)
end
if taken + 1 > floor + ratio * requests then
    return { 7 }
end
redis.call('HINCRBY', retries, now, 1)
return { 0 }
