-- restate: replace a worker's ledger by the numbers it gives, correct the totals by the difference,
-- and renew its lease. Joining, renewing and healing are all this one step.
--
-- A worker never replays what may have run; it says what is true. So this is right after a lost
-- reply, a FLUSHALL, a failover to an older replica and an expired lease alike.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> this worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  workers            ZSET   worker -> lease expiry, ms, Redis's clock
-- KEYS[5]  version            STRING registry version
-- KEYS[6]  load_index         STRING name of the groups that load:<group> are; gone where totals change
-- KEYS[7]  restating          STRING set where Redis has lost a worker that was a member: others may be missing too
-- ARGV[1]  worker             id
-- ARGV[2]  generation         of the connection this call came over; each new one is larger
-- ARGV[3]  lease              ms
-- ARGV[4]  within             ms in which every worker states its counts after a loss; 0: this one joins for the
--          first time, so nothing of it can be lost
-- ARGV[5+] url, count         the whole ledger, counts > 0
-- RETURN   {code, version, known, workers}  code: 0 stated, 4 superseded (a newer connection has spoken);
--          known: 1 where this generation was registered before, else 0; with code 4 the newer generation;
--          workers: how many the deployment has; 0 with code 4
-- COST     O(ledger)          CALLER app/store/ledger.py
local unfinished, ledger, sessions, workers = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local version_key, load_index, restating = KEYS[5], KEYS[6], KEYS[7]
local worker, generation, lease_ms, within_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local version = tonumber(redis.call('GET', version_key) or '0') or 0
local registered = redis.call('HGET', sessions, worker)
local newest = tonumber(registered or '0') or 0
if newest > tonumber(generation) then
    return { 4, version, newest, 0 }
end

-- The first write is one that a full Redis refuses, as it would each acquire: behind a DEL, which it takes, it takes
-- all (a script that has written is let run to its end), and the worker would join what it can't use.
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', workers, string.format('%.0f', now_ms + lease_ms), worker)

-- Counts are restated after a restart: replicas hear of them, the append-only file does not.
redis.set_repl(redis.REPL_REPLICA)
local stated = {}
for i = 5, #ARGV, 2 do
    stated[ARGV[i]] = tonumber(ARGV[i + 1])
end
-- This is the step that mends things, so what somebody wrote over the ledger must not stop it.
if redis.call('TYPE', ledger).ok ~= 'hash' then
    redis.call('DEL', ledger)
end
local correct_by = {}
local recorded = redis.call('HGETALL', ledger)
for i = 1, #recorded, 2 do
    correct_by[recorded[i]] = -(tonumber(recorded[i + 1]) or 0)
end
for url, count in pairs(stated) do
    correct_by[url] = (correct_by[url] or 0) + count
end
redis.call('DEL', ledger)
for url, count in pairs(stated) do
    redis.call('HSET', ledger, url, count)
end
-- A worker that joins may come from what an error left behind.
local corrected = registered ~= generation
for url, difference in pairs(correct_by) do
    if difference ~= 0 then
        corrected = true
        if redis.call('HINCRBY', unfinished, url, difference) <= 0 then
            redis.call('HDEL', unfinished, url)
        end
    end
end
if corrected then
    redis.call('DEL', load_index)
end

redis.set_repl(redis.REPL_ALL)
redis.call('HSET', sessions, worker, generation)
if not registered and within_ms > 0 then
    redis.call('SET', restating, worker, 'PX', within_ms)
end
return { 0, version, registered == generation and 1 or 0, redis.call('ZCARD', workers) }
