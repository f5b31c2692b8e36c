"""The bytes of messages: frames from client to server, and models from server to client. Formats: docs/wire.md.

Readers treat every buffer as hostile. They compare each stated length with the length of the buffer before they
allocate anything, they never unpickle, and they raise nothing but the errors of `bqsgd._src.errors`.
"""
