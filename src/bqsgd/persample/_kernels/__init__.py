"""The compiled loops behind the plain path: what a float32 tensor on the CPU goes through, faster and to the same bits.

`grid` whole steps, `loops` norms and sums of them, `tiles` and `vectors` their register tiles, `rowwise` products and
convolutions that treat every row alike.
"""
