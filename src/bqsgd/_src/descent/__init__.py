"""From what a round's messages add up to, to the next model; server and clients run the same code."""
