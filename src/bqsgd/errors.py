"""Every error the library raises on purpose, so that a caller can catch one family or one kind."""


class BqsgdError(Exception):
    """Base of all errors raised by bqsgd."""


class InvalidParameter(BqsgdError, ValueError):
    """An argument is outside what the mechanism, the theory or the format allows."""


class NonFiniteInput(BqsgdError, ValueError):
    """An array holds NaN or infinity."""


class OutOfRange(BqsgdError, ValueError):
    """A value lies beyond the encoder's range and the caller did not ask for the clamp."""


class FrameError(BqsgdError, ValueError):
    """A frame was refused; each subclass names one reason."""


class TruncatedFrame(FrameError):
    """The buffer ends before the header, or before the payload length the header states."""


class OversizedFrame(FrameError):
    """The buffer continues after the payload the header states."""


class BadMagic(FrameError):
    """The buffer does not start with the four bytes of a bqsgd frame."""


class UnsupportedVersion(FrameError):
    """The frame has a version this reader does not know."""


class ChecksumMismatch(FrameError):
    """Header or payload changed in transit."""


class BadHeader(FrameError):
    """A header field holds a value that no writer of this version gives it."""


class WrongDimension(FrameError):
    """The frame holds a different number of coordinates from what the reader expects or allows."""


class WrongParameters(FrameError):
    """The frame was made with a mechanism or range other than the reader expects."""


class WrongOrigin(FrameError):
    """The frame comes from a client or round other than the reader expects."""


class CodeOutOfRange(FrameError):
    """A code lies outside {0, ..., 2 levels + trials}."""


class BadPayload(FrameError):
    """The payload is not what the stated coding writes for the stated dimension."""


class ModelMessageError(FrameError):
    """A model message was refused; nothing was computed from it."""


class AccountingError(BqsgdError, ArithmeticError):
    """The accountant could not prove a figure (lost mass, overflow, no convergence)."""


class Infeasible(BqsgdError, ValueError):
    """No integer (levels, trials) meets the budget; the message names the nearest feasible trades."""


class BudgetExhausted(BqsgdError, RuntimeError):
    """The next release would pass the client's privacy budget; nothing was sent.

    >>> issubclass(BudgetExhausted, BqsgdError)
    True
    """


class LedgerError(BqsgdError, RuntimeError):
    """A ledger is unreadable, belongs to another client or run, or could not be made durable."""


class UnsafeFile(BqsgdError, RuntimeError):
    """A file that must be regular and of bounded size is a link, a pipe, a device or too large."""


class DataUnavailable(BqsgdError, RuntimeError):
    """No source of a data set answered; the message lists every source tried and what to do by hand."""
