"""Data sets by name, checked by hash; features of them; and shares of them for clients."""
