-- index_loads: order the nodes of a registry version by their load, group by group, for acquire_least_loaded.
--
-- KEYS[1]  unfinished         HASH   url -> total over all workers
-- KEYS[2]  version            STRING registry version
-- KEYS[3]  load_index         STRING name of the groups that load:<group> are
-- KEYS[4+] load:<group>       ZSET   <speed> <url> -> load: unfinished / speed. By learned speeds as
--                             acquire_least_loaded.lua says, and behind them: `learned` HASH, url -> learned speed,
--                             and `load_sums` HASH, load:<group> -> sum of learned / speed over its learned nodes
-- ARGV[1]  version            of the snapshot the groups come from
-- ARGV[2]  order              name of the groups: a registry version and a digest
-- ARGV[3]  lifetime           ms; then they are ordered anew, whatever somebody may have done to them
-- ARGV[4]  by                 'given': the operator's speeds; 'learned': the learned ones
-- ARGV[5+] size, member, ...  per group: how many nodes, and each as <speed> <url>
-- RETURN   {code, version}    code: 0 ordered, 2 snapshot is not current, 8 they are ordered already
-- COST     O(nodes * log(nodes)) CALLER app/store/ledger.py
local unfinished, version_key, load_index = KEYS[1], KEYS[2], KEYS[3]
local version, order, lifetime_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local by_learned, learned, sums = ARGV[4] == 'learned', KEYS[#KEYS - 1], KEYS[#KEYS]
local FIRST, FIRST_GROUP, AT_ONCE = 5, 4, 400

local at_once = redis.call('MGET', version_key, load_index)
local current, ordered = at_once[1] or '0', at_once[2]
if version ~= current then
    return { 2, tonumber(current) or 0 }
end
if ordered == order then
    return { 8, tonumber(current) or 0 }
end

-- As what they order: replicas hear of it, the append-only file does not.
redis.set_repl(redis.REPL_REPLICA)
if by_learned then
    redis.call('DEL', sums)
end
local at = FIRST
for group = FIRST_GROUP, by_learned and #KEYS - 2 or #KEYS do
    local size, sum = tonumber(ARGV[at]), 0
    redis.call('DEL', KEYS[group])
    for first = at + 1, at + size, AT_ONCE do
        local speeds, urls, entries = {}, {}, {}
        for i = first, math.min(first + AT_ONCE - 1, at + size) do
            speeds[#speeds + 1], urls[#urls + 1] = string.match(ARGV[i], '^(%S+) (.+)$')
        end
        local counts = redis.call('HMGET', unfinished, unpack(urls))
        local known = by_learned and redis.call('HMGET', learned, unpack(urls)) or {}
        for i = 1, #urls do
            local count, own = counts[i] or 0, tonumber(known[i] or nil)
            if own and own > 0 then
                entries[#entries + 1] = (count + 1) / own
                sum = sum + own / speeds[i]
            else
                entries[#entries + 1] = by_learned and -speeds[i] / (count + 1) or count / speeds[i]
            end
            entries[#entries + 1] = ARGV[first + i - 1]
        end
        redis.call('ZADD', KEYS[group], unpack(entries))
    end
    -- Nothing stays of a fleet that has become small; longer than what says that it is right.
    redis.call('PEXPIRE', KEYS[group], 2 * lifetime_ms)
    if by_learned then
        redis.call('HSET', sums, KEYS[group], string.format('%.17g', sum))
    end
    at = at + 1 + size
end
if by_learned then
    redis.call('PEXPIRE', sums, 2 * lifetime_ms)
end
redis.call('SET', load_index, order, 'PX', lifetime_ms)
return { 0, tonumber(current) or 0 }
