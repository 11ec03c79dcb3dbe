-- set_node_state: say that a node is ready, down, draining, ..., unless it was registered anew since.
--
-- KEYS[1]  nodes              SET    node URLs
-- KEYS[2]  node:<url>         HASH   what is known of the node
-- KEYS[3]  version            STRING registry version
-- ARGV[1]  url                node
-- ARGV[2]  incarnation        the registration that was looked at; '' = whichever it is now
-- ARGV[3]  state              the new one; '' = as it is
-- ARGV[4]  drain              ms from now that running requests get; '' where it does not drain
-- ARGV[5+] field, value       more to set in the same step (models, reason)
-- RETURN   {code, version}    code: 0 has another state now, 9 the same state and other fields, 6 was not
--                             there, 7 another incarnation, or draining (which only a new registration
--                             or a removal ends), 8 nothing to change
-- COST     O(fields)          CALLER app/store/registry.py
local nodes, node, version_key = KEYS[1], KEYS[2], KEYS[3]
local url, incarnation, state, drain = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local version = tonumber(redis.call('GET', version_key) or '0') or 0
if redis.call('SISMEMBER', nodes, url) == 0 then
    return { 6, version }
end
local before = redis.call('HGET', node, 'state')
if incarnation ~= '' and redis.call('HGET', node, 'incarnation') ~= incarnation then
    return { 7, version }
end
if state == '' then
    state = before
elseif before == 'draining' and state ~= 'draining' then
    return { 7, version }
end
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local changed = false
if before ~= state then
    redis.call('HSET', node, 'state', state, 'state_since_ms', string.format('%.0f', now_ms))
    -- An engine that registers itself does so when it starts. One that was named otherwise and comes back may
    -- have restarted: what others held of it, links above all, is void.
    local by_hand = redis.call('HGET', node, 'static') == '1' or redis.call('HGET', node, 'asked') == '1'
    local listed = (redis.call('HGET', node, 'source') or '') ~= ''
    if (by_hand or listed) and state == 'ready' and (before == 'down' or before == 'gone') then
        redis.call('HSET', node, 'life', version + 1)
    end
    changed = true
end
if drain ~= '' then
    redis.call('HSET', node, 'drain_until_ms', string.format('%.0f', now_ms + tonumber(drain)))
    changed = true
end
for i = 5, #ARGV, 2 do
    if redis.call('HGET', node, ARGV[i]) ~= ARGV[i + 1] then
        redis.call('HSET', node, ARGV[i], ARGV[i + 1])
        changed = true
    end
end
if not changed then
    return { 8, version }
end
version = redis.call('INCR', version_key)
if before == state then
    return { 9, version }
end
return { 0, version }
