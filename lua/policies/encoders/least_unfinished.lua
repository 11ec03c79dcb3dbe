-- Encoder policy least_unfinished: the encoder with the least unfinished / speed, item by item; ties
-- go round from the shared cursor, so that idle encoders fill evenly.
--
-- assign(nodes, start, item) -> index
--   nodes   array of {url, speed, unfinished, credit}, the last two 0 where they are not asked for; start: cursor,
--   from 0; item: from 1
-- Twin: app/balancing/encoders.py.
local MOVES_CURSOR, KEEPS_CREDIT, READS_UNFINISHED = true, false, true

local function assign(nodes, start, item)
    local best, least
    for step = 0, #nodes - 1 do
        local i = (start + item - 1 + step) % #nodes + 1
        local score = nodes[i].unfinished / nodes[i].speed
        if not least or score < least then
            best, least = i, score
        end
    end
    nodes[best].unfinished = nodes[best].unfinished + 1
    return best
end
