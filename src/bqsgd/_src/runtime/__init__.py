"""What holds for the whole process: threads and their arithmetic, signals, random generators, torch's modes."""
