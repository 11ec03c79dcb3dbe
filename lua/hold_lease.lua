-- hold_lease: take a lease that is free, or renew it where it is the caller's own.
--
-- KEYS[1]  lease              STRING holder's id, with an expiry
-- ARGV[1]  holder             id
-- ARGV[2]  lease              ms
-- RETURN   {code}             code: 0 held by the caller, 10 by another
-- COST     O(1)               CALLER workers/prober.py
local lease, holder, lease_ms = KEYS[1], ARGV[1], ARGV[2]

local current = redis.call('GET', lease)
if current and current ~= holder then
    return { 10 }
end
redis.call('SET', lease, holder, 'PX', lease_ms)
return { 0 }
