-- Policy least_expected_delay: the node with the least (unfinished + 1) / speed, by learned speeds; ties by draw.
--
-- choose(size, speeds, before, counts, means, tries, draw, chance, learned, skip) -> index, exploring
--   size candidates; the operator's speed of i is speeds[before + i]; false for what does not stand in Redis:
--   counts[i], its unfinished requests, learned[skip + i], its learned speed; draw, chance: numbers in [0, 1); the
--   others are for policies that read latencies
-- A node that is not learned counts as the average of those that are, by the operator's speeds, and the fewer such
-- nodes there are the less: one newcomer starts slowly, a fleet of newcomers does not. What idles is explored now
-- and then, by chance: so each has to show its speed some time, and none can draw much traffic by it.
-- Twin: app/balancing/least_expected_delay.py, which says where the formula comes from. The order of the additions is
-- part of the contract: both sides must round alike.
local READS_UNFINISHED, READS_LATENCY, READS_LEARNED = true, false, true
local EXPLORE_NEW, EXPLORE_IDLE, CAUTION = 0.1, 0.005, 0.9

local function choose(size, speeds, before, counts, means, tries, draw, chance, learned, skip)
    -- Most often all are learned and one is the best: this way through is the one that has to be short.
    local least, ties, first, missing = math.huge, 0, 1, 0
    for i = 1, size do
        local speed = learned[skip + i]
        if speed then
            local score = ((counts[i] or 0) + 1) / speed
            if score < least then
                least, ties, first = score, 1, i
            elseif score == least then
                ties = ties + 1
            end
        else
            missing = missing + 1
        end
    end
    if ties == 1 and missing == 0 and chance >= EXPLORE_IDLE then
        return first, false
    end

    if chance < EXPLORE_NEW then
        local idle = {}
        for i = 1, size do
            if (chance < EXPLORE_IDLE or not learned[skip + i]) and tonumber(counts[i] or 0) == 0 then
                idle[#idle + 1] = i
            end
        end
        if #idle > 0 then
            return idle[math.floor(draw * #idle) + 1], false
        end
    end

    local known, sum, tied = size - missing, 0, {}
    for i = 1, size do
        if learned[skip + i] then
            sum = sum + learned[skip + i] / speeds[before + i]
        end
    end
    local unit = known > 0 and sum / known * (1 - CAUTION * known / size) or 1
    least = math.huge
    for i = 1, size do
        local score = ((counts[i] or 0) + 1) / (learned[skip + i] or unit * speeds[before + i])
        if score < least then
            least, tied = score, { i }
        elseif score == least then
            tied[#tied + 1] = i
        end
    end
    return tied[math.floor(draw * #tied) + 1], false
end
