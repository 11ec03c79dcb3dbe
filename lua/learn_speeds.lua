-- learn_speeds: learn from answers that ended well how fast their nodes are, for least_expected_delay.
--
-- A sample is sqrt(unfinished + 1) * rate: why, and what it is worth, says its twin, app/balancing/learning.py. The
-- count is the shared one at this moment and not of when the request was dispatched: that measured alike, and no
-- request need carry it.
--
-- KEYS[1]  nodes              SET    node URLs
-- KEYS[2]  unfinished         HASH   url -> total over all workers
-- KEYS[3]  learned            HASH   url -> learned speed, what the policy goes by; no entry: to be shown anew
-- KEYS[4]  learned_since      STRING since when `learned` is as it is; taken away with a change
-- KEYS[5]  load_index         STRING name of the groups that load:<group> are
-- KEYS[6]  load_sums          HASH   load:<group> -> sum of learned / speed over its learned nodes
-- KEYS[7+] learning:<url>     HASH   speed, weight, shown, at_ms of each node; and behind each of these load:<group>,
--                             ZSET, <speed> <url> -> load, that of its group (any, if it is in none)
-- ARGV[1]  now                ms; '' = Redis's clock
-- ARGV[2]  order              name of the groups among which the caller looked for the nodes; '' = it did not
-- ARGV[3+] url, speed, n, then n times rate   per node: its speed in its group, '' = it is in none; work per second of
--                             its answers, oldest first
-- RETURN   {code}             code: 0 learned
-- COST     O(rates)           CALLER app/store/ledger.py
local nodes, unfinished, learned, learned_since = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local load_index, sums = KEYS[5], KEYS[6]
local now_ms, order = tonumber(ARGV[1]), ARGV[2]
local FIRST = 7
local HALF_LIFE_MS, KEPT, CLIP, SHOWN, STEADY = 8000, 8, math.log(4), 4, 1.01

if not now_ms then
    local now = redis.call('TIME')
    now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
end
local at, changed, moved = 3, false, {}
for i = FIRST, #KEYS, 2 do
    local url, given, n = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    -- A removed node is forgotten; its late answers must not bring it back.
    if redis.call('SISMEMBER', nodes, url) == 1 then
        local count = tonumber(redis.call('HGET', unfinished, url) or '0') or 0
        local root = math.sqrt(math.max(count, 0) + 1)
        local found = redis.call('HMGET', KEYS[i], 'speed', 'weight', 'shown', 'at_ms')
        local speed, weight = tonumber(found[1] or nil), tonumber(found[2] or nil) or 0
        local shown, at_ms = tonumber(found[3] or nil) or 0, tonumber(found[4] or nil) or now_ms
        local before = tonumber(redis.call('HGET', learned, url) or nil)
        if not before then
            shown = 0
        end
        if not (speed and speed > 0 and speed < math.huge) then
            speed, weight = root * tonumber(ARGV[at + 3]), 0
        end
        local decayed = weight * 0.5 ^ (math.max(now_ms - at_ms, 0) / HALF_LIFE_MS)
        weight = math.max(decayed, math.min(weight, KEPT))
        for j = at + 3, at + 2 + n do
            local off = math.log(root * tonumber(ARGV[j]) / speed)
            speed = speed * math.exp(math.max(-CLIP, math.min(CLIP, off)) / (weight + 1))
            weight = weight + 1
        end
        shown = math.min(shown + n, SHOWN)
        redis.call('HSET', KEYS[i], 'speed', string.format('%.9g', speed), 'weight', string.format('%.9g', weight),
            'shown', shown, 'at_ms', string.format('%.0f', now_ms))
        -- Workers are told of each change: none for what no decision would turn on. Asked so that NaN is replaced.
        local counted = speed * (1 + shown) / (1 + SHOWN)
        if not (before and counted <= before * STEADY and before <= counted * STEADY) then
            local text = string.format('%.4g', counted)
            redis.call('HSET', learned, url, text)
            if given ~= '' then
                moved[#moved + 1] = { i + 1, given, url, math.max(count, 0), before or 0, tonumber(text) }
            end
            changed = true
        end
    end
    at = at + 3 + n
end
if not changed then
    return { 0 }
end
redis.call('DEL', learned_since)
local ordered = redis.call('MGET', load_index)[1] -- nothing where it is of another type
if ordered and ordered ~= order then
    redis.call('DEL', load_index)
elseif ordered then
    -- As the counts that they are of: replicas hear of it, the append-only file does not.
    redis.set_repl(redis.REPL_REPLICA)
    for i = 1, #moved do
        local group, given, url, count, before, now = unpack(moved[i])
        redis.call('ZADD', KEYS[group], (count + 1) / now, string.format('%s %s', given, url))
        local sum = tonumber(redis.call('HGET', sums, KEYS[group]) or nil) or 0
        redis.call('HSET', sums, KEYS[group], string.format('%.17g', sum + (now - before) / given))
    end
end
return { 0 }
