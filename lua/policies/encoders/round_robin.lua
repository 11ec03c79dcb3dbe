-- Encoder policy round_robin: one item after the other round the encoders, from the shared cursor.
--
-- assign(nodes, start, item) -> index
--   nodes   array of {url, speed, unfinished, credit}, the last two 0 where they are not asked for; start: cursor,
--   from 0; item: from 1
-- Twin: app/balancing/encoders.py.
local MOVES_CURSOR, KEEPS_CREDIT, READS_UNFINISHED = true, false, false

local function assign(nodes, start, item)
    return (start + item - 1) % #nodes + 1
end
