"""Algorithm 1 as a product: clients, server, aggregation, optimisers, rounds."""
