-- drop_migration: strike off a worker's note of a session, or leave it to whoever looks for what nobody holds.
-- A note of another worker or life is another session's, which has been given the same number.
--
-- KEYS[1]  migrations         HASH   prefill|session -> JSON {decode, worker, life, at_ms, by, freed}
-- ARGV[1]  name               prefill|session
-- ARGV[2]  worker             id of who held it
-- ARGV[3]  life               of the prefill node
-- ARGV[4]  left               '1': it is still to be freed; '0': there is nothing left of it
-- RETURN   {code}             code: 0 done, 7 the note is another's, or there is none
-- COST     O(1)               CALLER app/store/migrations.py
local migrations = KEYS[1]
local name, worker, life, left = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'

local readable, record = pcall(cjson.decode, redis.call('HGET', migrations, name) or '')
if not readable or type(record) ~= 'table' or record.worker ~= worker or tonumber(record.life) ~= life then
    return { 7 }
end
if left and not record.freed then
    record.worker = ''
    redis.call('HSET', migrations, name, cjson.encode(record))
else
    redis.call('HDEL', migrations, name)
end
return { 0 }
