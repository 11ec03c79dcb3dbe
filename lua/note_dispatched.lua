-- note_dispatched: add requests that a worker has dispatched, node by node, to those of this slot of time.
--
-- KEYS[1]  dispatched         HASH   <slot> <url> -> requests in the slot, named by the second in which it began,
--                             Redis's clock; newest -> the newest slot
-- ARGV[1]  length             of a slot, seconds
-- ARGV[2]  slots              how many are kept, this one too
-- ARGV[3+] url, count         since the worker's last note
-- RETURN   {code}             code: 0 noted
-- COST     O(urls), and O(urls * slots) where a slot begins  CALLER app/store/ledger.py
local dispatched = KEYS[1]
local length, slots = tonumber(ARGV[1]), tonumber(ARGV[2])
local FIRST = 3

local now = tonumber(redis.call('TIME')[1])
local slot = now - now % length
if tonumber(redis.call('HGET', dispatched, 'newest') or '') ~= slot then
    local fields = redis.call('HKEYS', dispatched)
    for i = 1, #fields do
        -- Later ones too: a master that failed may have had a clock that was ahead.
        local began = tonumber(string.match(fields[i], '^(%d+) '))
        if not began or began > slot or began <= slot - slots * length then
            redis.call('HDEL', dispatched, fields[i])
        end
    end
    redis.call('HSET', dispatched, 'newest', slot)
end
for i = FIRST, #ARGV, 2 do
    redis.call('HINCRBY', dispatched, string.format('%.0f %s', slot, ARGV[i]), ARGV[i + 1])
end
-- Of a deployment that has ended nothing stays.
redis.call('EXPIRE', dispatched, slots * length)
return { 0 }
