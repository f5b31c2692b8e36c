"""What a run learns: your own task, or one that its settings name."""
