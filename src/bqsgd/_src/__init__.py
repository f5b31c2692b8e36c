"""Everything inside the package. Import public names from `bqsgd`; nothing in here is a stable interface."""
