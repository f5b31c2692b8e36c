"""Pages, charts and tables drawn from the records of runs."""
