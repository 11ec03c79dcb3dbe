-- Policy min_expected_latency: the node with the least unfinished / speed; ties by draw.
--
-- choose(nodes, draws) -> index, exploring
--   nodes   array of {speed, unfinished, mean, explored}; draws: two numbers in [0, 1)
-- Twin: app/balancing/min_expected_latency.py.
local READS_LATENCY = false

local function choose(nodes, draws)
    local least = math.huge
    local ties = {}
    for i = 1, #nodes do
        local score = nodes[i].unfinished / nodes[i].speed
        if score < least then
            least = score
            ties = { i }
        elseif score == least then
            ties[#ties + 1] = i
        end
    end
    return ties[math.floor(draws[1] * #ties) + 1], false
end
