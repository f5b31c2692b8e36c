"""Secure sums: the server learns the sum of the clients' codes and nothing else (docs/secure.md).

Read in this order: `agreement` (what all parties fix beforehand), `graph` (neighbours, thresholds, and why there is
only one sum), `client` with `key_exchange` and `server` with `opening` (the steps), `noise_shares` (noise that the
clients share exactly; Claim 12 in docs/accounting.md). `messages` are the bytes (docs/wire.md), `masks` and `sharing`
the cryptography, `state` what a client must not forget, `sparse` the graph of more than 200 clients, `roster` the
identity keys.
"""
