-- move_breaker: what becomes of a breaker that is not closed: half-open when its time is over, one trial, closed.
--
-- KEYS[1]  node:<url>         HASH   what is known of the node
-- KEYS[2]  version            STRING registry version
-- KEYS[3]  failures           HASH   url -> failures in a row, all workers
-- ARGV[1]  url                node
-- ARGV[2]  move               'half_open': if its time is over, or the node was down since; 'trial': claim the
--                             one trial of a half-open breaker; 'leave trial': it was given up; 'close': a
--                             request succeeded; 'close on probation': a probe did
-- ARGV[3]  number             half_open: 1 = before its time is over; trial: ms after which a trial that told
--                             nothing may be claimed again; close on probation: failures that stay counted;
--                             else not used
-- RETURN   {code, version}    code: 0 moved, 7 not from where it is
-- COST     O(1)               CALLER app/store/registry.py
local node, version_key, failures = KEYS[1], KEYS[2], KEYS[3]
local url, move, number = ARGV[1], ARGV[2], ARGV[3]

local version = tonumber(redis.call('GET', version_key) or '0') or 0
local breaker = redis.call('HGET', node, 'breaker')
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
if breaker ~= 'open' and breaker ~= 'half_open' then
    return { 7, version }
end

if move == 'half_open' then
    local until_ms = tonumber(redis.call('HGET', node, 'breaker_until_ms') or '0') or 0
    if breaker == 'half_open' or (number ~= '1' and until_ms > now_ms) then
        return { 7, version }
    end
    redis.call('HSET', node, 'breaker', 'half_open')
    redis.call('HDEL', node, 'trial_until_ms')
    return { 0, redis.call('INCR', version_key) }
elseif move == 'trial' then
    if breaker ~= 'half_open' or (tonumber(redis.call('HGET', node, 'trial_until_ms') or '0') or 0) > now_ms then
        return { 7, version }
    end
    -- No change of the registry: everybody else goes on as before.
    redis.call('HSET', node, 'trial_until_ms', string.format('%.0f', now_ms + tonumber(number)))
    return { 0, version }
elseif move == 'leave trial' then
    redis.call('HDEL', node, 'trial_until_ms')
    return { 0, version }
elseif move == 'close on probation' then
    if breaker ~= 'half_open' then
        return { 7, version }
    end
    redis.call('HSET', failures, url, number)
else
    redis.call('HDEL', failures, url)
    redis.call('HDEL', node, 'breaker_opens')
end
redis.call('HSET', node, 'breaker', 'closed')
redis.call('HDEL', node, 'breaker_until_ms', 'trial_until_ms')
return { 0, redis.call('INCR', version_key) }
