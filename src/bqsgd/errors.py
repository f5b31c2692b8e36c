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


class ModelNotHeld(ModelMessageError):
    """The message holds changes of a model that this client does not hold: it needs the whole model."""


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


class NotWritten(BqsgdError, OSError):
    """A file could not be written (full disk, no permission); what was there before is untouched."""


class FolderInUse(BqsgdError, RuntimeError):
    """Another process writes this folder; nothing was spent."""


class DataUnavailable(BqsgdError, RuntimeError):
    """No source of a data set answered; the message lists every source tried and what to do by hand."""


class SecureSumError(BqsgdError, RuntimeError):
    """A step of a secure sum was refused and nothing was revealed; each subclass names one reason."""


class BadSecureMessage(SecureSumError, ValueError):
    """The bytes are not a message of this kind: magic, version, kind, length, an entry out of place."""


class WrongSession(SecureSumError):
    """The message belongs to another run, roster or setting of the sum."""


class WrongRound(SecureSumError):
    """The message is of a round other than the one expected: late, replayed or ahead."""


class ForeignClient(SecureSumError):
    """The message names a client that is not in the roster, or not where the protocol has it."""


class BadSignature(SecureSumError):
    """A signature does not verify under the identity key that the roster has for the client."""


class ReplacedKeys(SecureSumError):
    """The server shows other keys of a client, for the same rounds, than it showed before."""


class BadShares(SecureSumError):
    """Encrypted shares do not open under the keys of sender and receiver, or do not fit together."""


class TooFewClients(SecureSumError):
    """Fewer clients take part than the threshold: going on would reveal a sum over too few."""


class ConflictingSurvivors(SecureSumError):
    """Two different lists of survivors for one round."""


class RoundUsed(SecureSumError):
    """The round was answered before; a second answer with the same masks would reveal a difference."""
