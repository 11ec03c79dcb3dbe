-- restate_migrations: make a worker's notes of sessions those that it gives: what it has struck off while Redis could
-- not hear it goes, what Redis has lost comes back, and the rest stays as it is.
--
-- KEYS[1]  migrations         HASH   prefill|session -> JSON {decode, worker, life, at_ms, by, freed}
-- ARGV[1]  worker             id
-- ARGV[2+] name, decode, life of each session that it holds
-- RETURN   {code}             code: 0 stated
-- COST     O(sessions of all workers)   CALLER app/store/migrations.py
local migrations, worker = KEYS[1], ARGV[1]

local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local held = {}
for i = 2, #ARGV, 3 do
    held[ARGV[i]] = { decode = ARGV[i + 1], worker = worker, life = tonumber(ARGV[i + 2]), at_ms = now_ms }
end
local notes = redis.call('HGETALL', migrations)
for i = 1, #notes, 2 do
    local name, readable, record = notes[i], pcall(cjson.decode, notes[i + 1])
    if readable and type(record) == 'table' then
        local mine, life = held[name], tonumber(record.life) or 0
        if mine and life > mine.life then
            held[name] = nil
        elseif mine and life == mine.life and record.worker == worker then
            record.decode, held[name] = mine.decode, record
        elseif not mine and record.worker == worker then
            redis.call('HDEL', migrations, name)
        end
    end
end
for name, record in pairs(held) do
    redis.call('HSET', migrations, name, cjson.encode(record))
end
return { 0 }
