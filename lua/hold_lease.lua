-- hold_lease: take a lease that is free; renew it, or give it back, where it is the caller's own.
--
-- KEYS[1]  lease              STRING holder's id, with an expiry
-- ARGV[1]  holder             id
-- ARGV[2]  lease              ms; 0 gives it back
-- RETURN   {code}             code: 0 held by the caller, 10 by another
-- COST     O(1)               CALLER workers/lease.py
local lease, holder, lease_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])

local current = redis.call('GET', lease)
local left_ms = redis.call('PTTL', lease)
-- A lease without an expiry, or a longer one than anybody takes, is nobody's: it was set by hand.
if current and current ~= holder and left_ms >= 0 and (left_ms <= lease_ms or lease_ms == 0) then
    return { 10 }
end
if lease_ms == 0 then
    redis.call('DEL', lease)
else
    redis.call('SET', lease, holder, 'PX', lease_ms)
end
return { 0 }
