"""Clamp to the range, quantise, add binomial noise (paper Section IV-A): values in, integer codes out, and back."""
