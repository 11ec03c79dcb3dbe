-- add_node: register a node or update its registration; running counts are never touched, and a node
-- that was named statically stays so when its engine registers itself. A source (`--discover`) touches no
-- node but its own.
--
-- KEYS[1]  nodes              SET    node URLs
-- KEYS[2]  node:<url>         HASH   what is known of the node
-- KEYS[3]  version            STRING registry version
-- KEYS[4]  engine_keys        HASH   url -> the key sent to that engine
-- KEYS[5]  failures           HASH   url -> failures in a row
-- ARGV[1]  url                node
-- ARGV[2]  key                of the engine; '' leaves what is there (engines register without one)
-- ARGV[3]  source             the source that lists it, '' = a call or a setting: from now on it is theirs
-- ARGV[4+] field, value       what the registration says
-- RETURN   {code, version}    code: 0 new, 9 updated, 7 not the source's
-- COST     O(fields)          CALLER app/store/registry.py
local nodes, node, version_key, engine_keys, failures = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local url, key, source = ARGV[1], ARGV[2], ARGV[3]

if source ~= '' and redis.call('EXISTS', node) == 1 and redis.call('HGET', node, 'source') ~= source then
    return { 7, tonumber(redis.call('GET', version_key) or '0') or 0 }
end
local now = redis.call('TIME')
local now_ms = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000))
local version = redis.call('INCR', version_key)
local known = redis.call('SADD', nodes, url) == 0 and redis.call('EXISTS', node) == 1

local order, first_at_ms = version, now_ms
if known then
    order = redis.call('HGET', node, 'order') or order
    first_at_ms = redis.call('HGET', node, 'registered_at_ms') or first_at_ms
end
local static = redis.call('HGET', node, 'static') == '1'
redis.call('DEL', node)
-- Its breaker is closed with the registration; those of the process before must not open it again.
redis.call('HDEL', failures, url)
redis.call('HSET', node, 'order', order, 'registered_at_ms', first_at_ms, 'state_since_ms', now_ms,
    'incarnation', version, 'life', version)
for i = 4, #ARGV, 2 do
    redis.call('HSET', node, ARGV[i], ARGV[i + 1])
end
if static then
    redis.call('HSET', node, 'static', '1')
end
if key ~= '' then
    redis.call('HSET', engine_keys, url, key)
elseif source ~= '' then
    redis.call('HDEL', engine_keys, url) -- a source says all there is
end
return { known and 9 or 0, version }
