-- Part give_back: requests of a worker on a node have ended; the counts stand once, for every script that gives back.
--
-- give_back(unfinished, ledger, url, requests) -> missed, running
--   requests: how many; missed: how many of them were not counted, and so are not given back; running: what the node
--   has left over all workers, nil where nothing was given back
local function give_back(unfinished, ledger, url, requests)
    local left = redis.call('HINCRBY', ledger, url, -requests)
    if left <= 0 then
        redis.call('HDEL', ledger, url)
    end
    local missed = left < 0 and math.min(requests, -left) or 0
    if missed == requests then
        return missed, nil
    end
    local running = redis.call('HINCRBY', unfinished, url, missed - requests)
    if running <= 0 then
        redis.call('HDEL', unfinished, url)
    end
    return missed, running
end
