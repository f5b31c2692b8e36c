"""What the mechanism guarantees, proven for the worst case over data: the accountant and its guarantee."""
