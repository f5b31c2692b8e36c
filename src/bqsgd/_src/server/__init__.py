"""The server of a run: whom it asks, what it sends, what it accepts, and how it steps."""
