"""An empirical lower bound on epsilon, measured on the real code. Passing proves nothing; failing proves a fault.

A source of observations runs two worlds that differ in one record: the encoder alone (`audit.encoder`) or clients from
their data to their frames (`audit.client`, the only module here that imports torch). `audit.bound` compares what the
source observes with a claim.
"""
