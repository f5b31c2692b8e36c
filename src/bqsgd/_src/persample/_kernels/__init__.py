"""The compiled loops behind the plain path: what a float32 tensor on the CPU goes through.

`lanes` runs one sample's operations on 16 samples at once, and `pairs` makes gradients that are sums over positions.
`loops` finds norms and sums of whole steps (`grid`) with the loops of `contiguous`, which read sample after sample.
`vectors` has what register tiles are made of. The threads that all of them use are in `runtime.threads`.
"""
