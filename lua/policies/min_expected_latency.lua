-- Policy min_expected_latency: the node with the least unfinished / speed; ties by draw.
--
-- choose(size, speeds, before, counts, means, tries, draw, chance) -> index, exploring
--   size candidates; the speed of i is speeds[before + i]; counts[i]: its unfinished requests, false for 0;
--   draw: a number in [0, 1); the others are for policies that read latencies
-- Twin: app/balancing/min_expected_latency.py.
local READS_UNFINISHED, READS_LATENCY, READS_LEARNED = true, false, false

local function choose(size, speeds, before, counts, means, tries, draw, chance)
    local least, ties, first = math.huge, 0, 1
    for i = 1, size do
        local score = (counts[i] or 0) / speeds[before + i]
        if score < least then
            least, ties, first = score, 1, i
        elseif score == least then
            ties = ties + 1
        end
    end
    if ties == 1 then
        return first, false
    end
    -- The draw says which of the ties it is: no list of them is needed.
    local left = math.floor(draw * ties)
    for i = first, size do
        if (counts[i] or 0) / speeds[before + i] == least then
            if left == 0 then
                return i, false
            end
            left = left - 1
        end
    end
end
