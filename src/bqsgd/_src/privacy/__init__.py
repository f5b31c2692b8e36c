"""What the mechanism guarantees, proven for the worst case over data: the accountant and its guarantee.

`accountant` is the entry. Its steps, each with its claim in docs/accounting.md: `_message` makes the pair of one
message under an L-infinity bound (Claims 1, 2), `_shapes` under an L2 bound as well (Claim 10), `_pairs` puts pairs on
a grid (Claim 6), `_rounds` samples and composes them (Claim 3). `_renyi` is the second route, through moments (Claims
4, 5).
"""
