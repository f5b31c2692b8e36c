"""Algorithm 1: settings, task, client, server, aggregation and optimisers."""
