"""Secure sums: the server learns the sum of the clients' codes and nothing else (docs/secure.md)."""
