"""The models of the paper and of the frontier."""
