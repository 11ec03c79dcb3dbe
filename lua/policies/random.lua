-- Policy random: a node with a chance proportional to its speed.
--
-- choose(nodes, draws) -> index, exploring
--   nodes   array of {speed, unfinished, mean, explored}; draws: two numbers in [0, 1)
-- Twin: app/balancing/random.py. The order of the additions is part of the contract: both sides
-- must round alike.
local READS_LATENCY = false

local function choose(nodes, draws)
    local total = 0
    for i = 1, #nodes do
        total = total + nodes[i].speed
    end
    local point = draws[1] * total
    for i = 1, #nodes do
        point = point - nodes[i].speed
        if point < 0 then
            return i, false
        end
    end
    return #nodes, false
end
