-- claim_link: find out whether a prefill and a decode node are linked, and if not, who links them.
--
-- KEYS[1]  links              HASH   prefill|decode -> JSON record of the link
-- KEYS[2]  workers            ZSET   worker -> lease expiry, ms, Redis's clock
-- KEYS[3]  version            STRING registry version
-- KEYS[4]  restating          STRING there while workers that Redis has lost may not have said their claims again
-- ARGV[1]  pair               prefill|decode
-- ARGV[2]  worker             id of who asks
-- ARGV[3]  lives              of both nodes, as the caller knows them: a link of other lives is void
-- ARGV[4]  version            of the registry snapshot that the lives come from
-- ARGV[5]  wait               ms that linking may take
-- RETURN   {code, record}     code: 0 the caller links now (record: its claim, to be settled), 8 linked,
--          10 another worker is at it, 7 it failed a moment ago (record says why), 2 the caller's
--          snapshot is older than the link (refresh first), 6 nobody may claim yet: Redis has lost
--          everything, other workers' claims too, until they have said them again
-- COST     O(1)               CALLER app/store/links.py
local links, workers, version_key, restating = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local pair, worker, lives, version, wait_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)

local text = redis.call('HGET', links, pair)
local readable, record = pcall(cjson.decode, text or '')
if not readable or type(record) ~= 'table' then
    record = {}
end
-- Of a registry version that never was: somebody wrote it.
if (tonumber(record.version) or 0) > (tonumber(redis.call('GET', version_key) or '0') or 0) then
    record = {}
end
local until_ms = tonumber(record.until_ms) or 0
local same = record.lives == lives
if not same and (tonumber(record.version) or 0) > version then
    return { 2, text }
end
if same and record.state == 'connected' then
    return { 8, text }
end
if same and record.state == 'failed' and now_ms < until_ms then
    return { 7, text }
end
-- Held whatever its lives: two that work at one pair would undo each other's steps, and whoever works for
-- lives that are over finds that out by itself.
if not redis.call('ZSCORE', workers, worker) then
    return { 6, '' }
end
if record.state == 'connecting' or record.state == 'undoing' then
    local alive = redis.call('ZSCORE', workers, tostring(record.owner))
    if now_ms < until_ms and alive and tonumber(alive) > now_ms then
        return { 10, text }
    end
end

-- One that does not expire is somebody's rubbish.
if redis.call('PTTL', restating) > 0 then
    return { 6, '' }
end
local claim = cjson.encode({
    state = 'connecting', owner = worker, lives = lives, version = version,
    since_ms = now_ms, until_ms = now_ms + wait_ms, failures = same and tonumber(record.failures) or 0,
})
redis.call('HSET', links, pair, claim)
return { 0, claim }
