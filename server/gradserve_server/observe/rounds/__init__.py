"""The rounds of all accumulators: who came when, who was late, who is missing."""
