-- Policy min_observed_latency: the node with the least mean of its latency window; ties by draw.
--
-- choose(nodes, draws) -> index, exploring
--   nodes   array of {speed, unfinished, mean, explored}; draws: two numbers in [0, 1)
-- A node without history ranks last, but is explored while nothing runs on it: at once the first
-- time, with the chance EXPLORE_RATIO after an exploration that brought no latency (a node that
-- fails fast must not draw the traffic). With no history anywhere: the least unfinished / speed.
-- Twin: app/balancing/min_observed_latency.py.
local READS_LATENCY = true
local EXPLORE_RATIO = 0.1

local function choose(nodes, draws)
    local fresh, least, best, load, idle = {}, math.huge, {}, math.huge, {}
    for i = 1, #nodes do
        local node = nodes[i]
        if node.mean then
            if node.mean < least then
                least = node.mean
                best = { i }
            elseif node.mean == least then
                best[#best + 1] = i
            end
        else
            if node.unfinished == 0 and (node.explored == 0 or draws[2] < EXPLORE_RATIO) then
                fresh[#fresh + 1] = i
            end
            local score = node.unfinished / node.speed
            if score < load then
                load = score
                idle = { i }
            elseif score == load then
                idle[#idle + 1] = i
            end
        end
    end
    if #fresh > 0 then
        return fresh[math.floor(draws[1] * #fresh) + 1], true
    elseif #best > 0 then
        return best[math.floor(draws[1] * #best) + 1], false
    end
    return idle[math.floor(draws[1] * #idle) + 1], true
end
