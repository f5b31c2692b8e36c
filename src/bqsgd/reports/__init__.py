"""Records of runs, and the tables, figures and pages drawn from them."""
