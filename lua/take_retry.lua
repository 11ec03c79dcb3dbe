-- take_retry: whether the deployment can afford one more request that an engine gets a second time.
--
-- KEYS[1]  retries            HASH   second, Redis's clock -> retries in it
-- KEYS[2]  requests           HASH   second, Redis's clock -> requests in it
-- ARGV[1]  window             seconds
-- ARGV[2]  ratio              retries a request
-- ARGV[3]  floor              retries that are always affordable
-- RETURN   {code}             code: 0 taken, 7 it can't
-- COST     O(window)          CALLER app/store/budget.py
local retries, requests = KEYS[1], KEYS[2]
local window, ratio, floor = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local now = tonumber(redis.call('TIME')[1])

local function is_recent(second)
    local age = now - (tonumber(second) or 0)
    return age >= 0 and age < window
end

local taken, counted = 0, 0
local seconds = redis.call('HGETALL', retries)
for i = 1, #seconds, 2 do
    if is_recent(seconds[i]) then
        taken = taken + (tonumber(seconds[i + 1]) or 0)
    else
        redis.call('HDEL', retries, seconds[i])
    end
end
seconds = redis.call('HGETALL', requests)
for i = 1, #seconds, 2 do
    if is_recent(seconds[i]) then
        counted = counted + (tonumber(seconds[i + 1]) or 0)
    end
end
if taken + 1 > floor + ratio * counted then
    return { 7 }
end
redis.call('HINCRBY', retries, now, 1)
return { 0 }
