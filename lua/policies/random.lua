-- Policy random: a node with a chance proportional to its speed.
--
-- choose(size, speeds, before, counts, means, tries, draw, chance) -> index, exploring
--   size candidates; the speed of i is speeds[before + i]; draw: a number in [0, 1); the others are for
--   policies that read counts or latencies
-- Twin: app/balancing/random.py. The order of the additions is part of the contract: both sides
-- must round alike.
local READS_UNFINISHED, READS_LATENCY, READS_LEARNED = false, false, false

local function choose(size, speeds, before, counts, means, tries, draw, chance)
    local total = 0
    for i = 1, size do
        total = total + speeds[before + i]
    end
    local point = draw * total
    for i = 1, size do
        point = point - speeds[before + i]
        if point < 0 then
            return i, false
        end
    end
    return size, false
end
