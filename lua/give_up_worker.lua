-- give_up_worker: subtract a dead worker's ledger from the totals and forget the worker.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  unfinished:<w>     HASH   url -> that worker's share, its ledger
-- KEYS[3]  sessions           HASH   worker -> generation of its connection
-- KEYS[4]  workers            ZSET   worker -> lease expiry, ms, Redis's clock
-- KEYS[5]  handing:<w>        HASH   prefill|decode -> that worker's hand-overs
-- KEYS[6]  load_index         STRING name of the groups that load:<group> are; gone where totals change
-- ARGV[1]  worker             id
-- ARGV[2]  certain            '1': its death is known (its host's master saw it end, or it leaves);
--                             '0': only if its lease is over
-- RETURN   {code, returned}   code: 0 given up, 5 its lease still runs; returned: requests
-- COST     O(ledger)          CALLER app/store/ledger.py, workers/reaper.py
local unfinished, ledger, sessions, workers = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local handing, load_index = KEYS[5], KEYS[6]
local worker, certain = ARGV[1], ARGV[2] == '1'

if not certain then
    local expiry = redis.call('ZSCORE', workers, worker)
    local now = redis.call('TIME')
    local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
    if expiry and tonumber(expiry) > now_ms then
        return { 5, 0 }
    end
end
-- Counts are restated after a restart: replicas hear of them, the append-only file does not.
redis.set_repl(redis.REPL_REPLICA)
if redis.call('TYPE', ledger).ok ~= 'hash' then
    redis.call('DEL', ledger)
end
local returned = 0
local recorded = redis.call('HGETALL', ledger)
for i = 1, #recorded, 2 do
    local url, count = recorded[i], tonumber(recorded[i + 1]) or 0
    returned = returned + count
    if redis.call('HINCRBY', unfinished, url, -count) <= 0 then
        redis.call('HDEL', unfinished, url)
    end
end
redis.call('DEL', load_index)
redis.set_repl(redis.REPL_ALL)
redis.call('DEL', ledger, handing)
redis.call('ZREM', workers, worker)
redis.call('HDEL', sessions, worker)
return { 0, returned }
