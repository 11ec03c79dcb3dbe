-- Encoder policy weighted: smooth weighted round robin by speed.
--
-- assign(nodes, start, item) -> index
--   nodes   array of {url, speed, unfinished, credit}, the last two 0 where they are not asked for; start: cursor,
--   from 0; item: from 1
-- Every encoder earns its speed, the richest is taken and pays what all have earned; ties by
-- registration order (source: nginx, ngx_http_upstream_round_robin.c). Nobody owes or is owed more
-- than two rounds (by itself it comes to 1.5, with 64 encoders): else a credit in old speeds, or rubbish,
-- would starve or flood an encoder in new ones.
-- Twin: app/balancing/encoders.py.
local MOVES_CURSOR, KEEPS_CREDIT, READS_UNFINISHED = false, true, false

local function assign(nodes, start, item)
    local total, best = 0, 1
    for i = 1, #nodes do
        total = total + nodes[i].speed
    end
    local most = 2 * total
    for i = 1, #nodes do
        local credit = nodes[i].credit
        credit = credit == credit and math.max(-most, math.min(most, credit)) or 0
        nodes[i].credit = credit + nodes[i].speed
        if nodes[i].credit > nodes[best].credit then
            best = i
        end
    end
    nodes[best].credit = nodes[best].credit - total
    return best
end
