"""The published theory: nominal privacy, its planner, Theorem 1, the tables, trade-offs and figures. No guarantees."""
