"""Frames: the bytes of one message, written by clients and checked by a server that trusts nobody."""
