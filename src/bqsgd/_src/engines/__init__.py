"""Engines carry bytes between server and clients; they hold no algorithm."""
