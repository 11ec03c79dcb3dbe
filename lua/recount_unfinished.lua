-- recount_unfinished: make the totals the sum of all ledgers, in case somebody deleted or edited them.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  workers            ZSET   worker -> lease expiry, ms, Redis's clock
-- KEYS[3]  load_index         STRING name of the groups that load:<group> are; gone where totals change
-- KEYS[4+] unfinished:<w>     HASH   url -> that worker's share; one per worker
-- ARGV[1+] worker             ids, in the order of KEYS[4+]
-- RETURN   {code, corrected}  code: 0 counted, 2 the workers are others by now (call again);
--          corrected: how many totals were wrong
-- COST     O(workers * nodes) CALLER workers/prober.py
local unfinished, workers, load_index = KEYS[1], KEYS[2], KEYS[3]
local FIRST_LEDGER = 4

if redis.call('ZCARD', workers) ~= #ARGV then
    return { 2, 0 }
end
local sums = {}
for i = 1, #ARGV do
    if not redis.call('ZSCORE', workers, ARGV[i]) then
        return { 2, 0 }
    end
    local recorded = redis.call('HGETALL', KEYS[FIRST_LEDGER + i - 1])
    for j = 1, #recorded, 2 do
        sums[recorded[j]] = (sums[recorded[j]] or 0) + (tonumber(recorded[j + 1]) or 0)
    end
end
-- Counts are restated after a restart: replicas hear of them, the append-only file does not.
redis.set_repl(redis.REPL_REPLICA)
if redis.call('TYPE', unfinished).ok ~= 'hash' then
    redis.call('DEL', unfinished)
end
local corrected = 0
local totals = redis.call('HGETALL', unfinished)
for i = 1, #totals, 2 do
    local url, total = totals[i], tonumber(totals[i + 1])
    if total and sums[url] == total then
        sums[url] = nil
    elseif not sums[url] then
        corrected = corrected + 1
        redis.call('HDEL', unfinished, url)
    end
end
for url, sum in pairs(sums) do
    if sum > 0 then
        corrected = corrected + 1
        redis.call('HSET', unfinished, url, sum)
    end
end
if corrected > 0 then
    redis.call('DEL', load_index)
end
return { 0, corrected }
