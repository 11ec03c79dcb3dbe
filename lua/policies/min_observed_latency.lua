-- Policy min_observed_latency: the node with the least mean of its latency window; ties by draw.
--
-- choose(size, speeds, before, counts, means, tries, draw, chance) -> index, exploring
--   size candidates; the speed of i is speeds[before + i]; false for what does not stand in Redis: counts[i],
--   its unfinished requests, means[i], of its latency window, tries[i], explorations since its last success;
--   draw, chance: numbers in [0, 1)
-- A node without history ranks last, but is explored while nothing runs on it: at once the first
-- time, with the chance EXPLORE_RATIO after an exploration that brought no latency (a node that
-- fails fast must not draw the traffic). With no history anywhere: the least unfinished / speed.
-- Twin: app/balancing/min_observed_latency.py.
local READS_UNFINISHED, READS_LATENCY, READS_LEARNED = true, true, false
local EXPLORE_RATIO = 0.1

local function choose(size, speeds, before, counts, means, tries, draw, chance)
    local fresh, least, best, load, idle = {}, math.huge, {}, math.huge, {}
    for i = 1, size do
        local mean = tonumber(means[i] or nil)
        if mean then
            if mean < least then
                least, best = mean, { i }
            elseif mean == least then
                best[#best + 1] = i
            end
        else
            local count = tonumber(counts[i] or 0)
            if count == 0 and (chance < EXPLORE_RATIO or tonumber(tries[i] or 0) == 0) then
                fresh[#fresh + 1] = i
            end
            local score = count / speeds[before + i]
            if score < load then
                load, idle = score, { i }
            elseif score == load then
                idle[#idle + 1] = i
            end
        end
    end
    if #fresh > 0 then
        return fresh[math.floor(draw * #fresh) + 1], true
    elseif #best > 0 then
        return best[math.floor(draw * #best) + 1], false
    end
    return idle[math.floor(draw * #idle) + 1], true
end
