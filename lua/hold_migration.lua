-- hold_migration: note that a prefill engine keeps the cache of a session until decode has taken it over.
-- If the worker dies before, another one finds the note and frees the cache.
--
-- KEYS[1]  migrations         HASH   prefill|session -> JSON {decode, worker, life, at_ms}
-- ARGV[1]  name               prefill|session
-- ARGV[2]  decode             URL of the node that takes it over
-- ARGV[3]  worker             id of who serves the request
-- ARGV[4]  life               of the prefill node: after a restart the same number is another session
-- RETURN   {code}             code: 0 noted, 2 a later process has given the number to another session
-- COST     O(1)               CALLER app/store/migrations.py
local migrations = KEYS[1]
local name, decode, worker, life = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local readable, record = pcall(cjson.decode, redis.call('HGET', migrations, name) or '')
if readable and type(record) == 'table' and (tonumber(record.life) or 0) > life then
    return { 2 }
end
local now = redis.call('TIME')
redis.call('HSET', migrations, name, cjson.encode({
    decode = decode, worker = worker, life = life, at_ms = now[1] * 1000 + math.floor(now[2] / 1000),
}))
return { 0 }
