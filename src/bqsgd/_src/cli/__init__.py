"""The `bqsgd` command: one module per command or command group, registered in `app`."""
