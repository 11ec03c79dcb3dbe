-- swap_record: replace or delete a record of a hash, if it is still the one that the caller saw. Of several
-- workers that want to do what the record stands for, one is told that it may.
--
-- KEYS[1]  records            HASH   name -> record: `links` or `migrations`
-- ARGV[1]  name               of the record
-- ARGV[2]  seen               the record that the caller read; '' = none
-- ARGV[3]  new                the record from now on; '' = none
-- RETURN   {code}             code: 0 done, 7 it is another one by now
-- COST     O(1)               CALLER app/store/links.py
local records, name, seen, new = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

if (redis.call('HGET', records, name) or '') ~= seen then
    return { 7 }
end
if new == '' then
    redis.call('HDEL', records, name)
else
    redis.call('HSET', records, name, new)
end
return { 0 }
