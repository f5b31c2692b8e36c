"""A client of a run: its data, its draws, and the one place where something leaves it (`sender`)."""
