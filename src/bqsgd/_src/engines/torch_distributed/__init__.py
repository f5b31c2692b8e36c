"""torch.distributed: each rank is a client, and rank 0 is the server as well. And a hook for existing DDP scripts."""
