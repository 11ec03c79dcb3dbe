-- restore_registry: write a worker's last known registry back after Redis lost it, or fell back to
-- an older copy. The newest snapshot wins, in whatever order the workers come.
--
-- KEYS[1]  nodes              SET    node URLs
-- KEYS[2]  version            STRING registry version
-- KEYS[3]  engine_keys        HASH   url -> the key sent to that engine
-- KEYS[4+] node:<url>         HASH   what is known of a node; first those of the snapshot, then
--                             those that stand in `nodes` now and are not in the snapshot
-- ARGV[1]  version            of the snapshot
-- ARGV[2]  repair             '1': the version is right but keys are missing or damaged
-- ARGV[3]  count              nodes in the snapshot
-- ARGV[4+] url, key, n, then n times field, value   per node of the snapshot; after the last one
--                             the URLs that go with the remaining KEYS
-- RETURN   {code, version}    code: 0 restored, 8 what is there is as new or newer
-- COST     O(nodes)           CALLER app/store/registry.py
local nodes, version_key, engine_keys = KEYS[1], KEYS[2], KEYS[3]
local snapshot_version, repair, count = tonumber(ARGV[1]), ARGV[2] == '1', tonumber(ARGV[3])
local FIRST_NODE = 4

local version = tonumber(redis.call('GET', version_key) or '0') or 0
local newer = snapshot_version > version
if not newer and not (repair and snapshot_version == version) then
    return { 8, version }
end
redis.call('DEL', engine_keys)
local at = 4
for i = 1, count do
    local url, key, n = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    local node = KEYS[FIRST_NODE + i - 1]
    at = at + 3
    redis.call('SADD', nodes, url)
    redis.call('DEL', node)
    for j = at, at + 2 * n - 1, 2 do
        redis.call('HSET', node, ARGV[j], ARGV[j + 1])
    end
    at = at + 2 * n
    if key ~= '' then
        redis.call('HSET', engine_keys, url, key)
    end
end
for i = FIRST_NODE + count, #KEYS do
    redis.call('SREM', nodes, ARGV[at])
    redis.call('DEL', KEYS[i])
    at = at + 1
end
-- What is restored keeps its version: a worker with a newer snapshot must still see that it is the
-- newer one, and one with the same that there is nothing to do. A repair is a change like any other.
version = newer and snapshot_version or version + 1
redis.call('SET', version_key, version)
return { 0, version }
