"""Why a frame was refused: one class a reason, all of them `bqsgd.errors.FrameError`."""

from __future__ import annotations

from bqsgd.errors import FrameError


class TruncatedFrame(FrameError):
    """The buffer ends before the header, or before the payload length the header states."""


class OversizedFrame(FrameError):
    """The buffer goes on after the payload the header states."""


class BadMagic(FrameError):
    """The buffer does not start with the four bytes of a bqsgd frame."""


class UnsupportedVersion(FrameError):
    """The frame is of a version this reader does not know."""


class ChecksumMismatch(FrameError):
    """Header or payload were changed on the way."""


class BadHeader(FrameError):
    """A header field holds a value that no writer of this version gives it."""


class WrongDimension(FrameError):
    """The frame holds another number of coordinates than the reader expects or allows."""


class WrongParameters(FrameError):
    """The frame was made with another mechanism or range than the reader expects."""


class WrongOrigin(FrameError):
    """The frame comes from another client or another round than the reader expects."""


class CodeOutOfRange(FrameError):
    """A code lies outside {0, ..., 2 levels + trials}."""


class BadPayload(FrameError):
    """The payload is not what the stated coding writes for the stated dimension."""
