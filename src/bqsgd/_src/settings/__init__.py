"""The settings of a run, their defaults, and what follows from them before any data are read."""
