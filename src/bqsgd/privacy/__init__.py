"""What the mechanism guarantees: the paper's nominal figures, the exact accountant, the ledger."""
