"""Data sets from wherever they can be found, checked by hash, and their partition over clients."""
