"""Side-by-side runs against what one would otherwise use; each module is run with `python -m benchmarks.NAME`."""
