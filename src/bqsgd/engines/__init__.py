"""Engines carry frames between clients and server; they hold no algorithm."""
