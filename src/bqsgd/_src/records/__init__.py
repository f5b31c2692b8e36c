"""What a run leaves behind: a record per round, a summary, a checkpoint, and the folder that holds them."""
