"""The `bqsgd` command: one file a command, registered in `app`."""
