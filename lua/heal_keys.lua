-- heal_keys: take away what somebody wrote over a key and what no other script could read; what belongs
-- there is stated, recounted or restored by its owners afterwards, as after a loss.
--
-- KEYS[1]  version            STRING registry version
-- KEYS[2+] any                KEY    a key of the deployment, `version` too
-- ARGV[1]  ahead              ms that an instant may lie ahead of Redis's clock
-- ARGV[2+] type, values       per key of KEYS[2+], from app/store/keys.py: its type as TYPE says it; text,
--                             registry (text; a loss of the key is a loss of the registry, so `version` goes
--                             too and the newest snapshot comes back), count, number, seconds, instant
-- RETURN   {code, healed}     code: 0 looked; healed: key, the type it had, values dropped (0: the whole
--                             key), and so on for each that was not as it must be
-- COST     O(values)          CALLER app/store/registry.py
local version_key, ahead = KEYS[1], tonumber(ARGV[1])
local FIRST = 2
-- Above this a float has no place left for what is counted one by one.
local DIGITS, LIMIT = 15, 1e15

local now = redis.call('TIME')
local latest = now[1] * 1000 + math.floor(now[2] / 1000) + ahead

local function fits(values, text)
    if values == 'count' or values == 'instant' then
        -- As it is written by INCR: '007' is another text than '7', and versions are compared as texts.
        local whole = (text == '0' or string.find(text, '^[1-9]%d*$')) and #text <= DIGITS
        return whole and (values == 'count' or tonumber(text) <= latest)
    elseif values == 'number' or values == 'seconds' then
        -- Compared from both sides: what is no number on either is NaN.
        local number, least = tonumber(text), values == 'seconds' and 0 or -LIMIT
        return number and number >= least and number < LIMIT
    end
    return true
end

local function drop_misfits(key, type, values)
    local dropped = 0
    if values == 'text' or values == 'registry' then
        return 0
    elseif type == 'string' then
        if not fits(values, redis.call('GET', key)) then
            dropped = redis.call('DEL', key)
        end
    elseif type == 'hash' then
        local fields = redis.call('HGETALL', key)
        for i = 1, #fields, 2 do
            if not fits(values, fields[i + 1]) then
                dropped = dropped + redis.call('HDEL', key, fields[i])
            end
        end
    elseif type == 'list' then
        local items = redis.call('LRANGE', key, 0, -1)
        for i = 1, #items do
            if not fits(values, items[i]) then
                dropped = dropped + redis.call('LREM', key, 0, items[i])
            end
        end
    elseif type == 'zset' then
        dropped = redis.call('ZREMRANGEBYSCORE', key, string.format('(%.0f', latest), '+inf')
    end
    return dropped
end

local healed = {}
for i = FIRST, #KEYS do
    local key, type, values = KEYS[i], ARGV[2 * i - 2], ARGV[2 * i - 1]
    local found, dropped = redis.call('TYPE', key).ok, 0
    if found == type then
        dropped = drop_misfits(key, type, values)
    elseif found ~= 'none' then
        redis.call('DEL', key)
        if values == 'registry' then
            redis.call('DEL', version_key)
        end
    end
    if dropped > 0 or (found ~= type and found ~= 'none') then
        healed[#healed + 1] = key
        healed[#healed + 1] = found
        healed[#healed + 1] = dropped
    end
end
return { 0, healed }
