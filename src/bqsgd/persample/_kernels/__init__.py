"""The compiled loops behind the plain path: what a float32 tensor on the CPU goes through, faster and to the same bits.

`lanes` runs one sample's operations on 16 samples at once; `loops` chooses among the loops for norms and sums of whole
steps (`grid`), of samples that lie one after another (`contiguous`) or beside each other (`beside`); `tiles` and
`vectors` are register tiles, `threads` the threads that all of them use.
"""
