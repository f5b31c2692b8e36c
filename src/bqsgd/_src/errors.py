"""All errors that the library raises on purpose. Catch `BqsgdError` for any of them, or a subclass for one reason.

Each class also derives from the built-in error that fits best (ValueError, RuntimeError, ...), so that code that does
not know bqsgd handles it sensibly. Whatever bytes or files a peer sends, nothing but these errors may come out. Their
texts may quote a peer, so only line breaks are kept in them as they are: see `one_line`.
"""

from bqsgd._src.text import one_line


class BqsgdError(Exception):
    """Base of all errors raised by bqsgd."""

    def __str__(self) -> str:
        return "\n".join(one_line(line, limit=None) for line in super().__str__().split("\n"))


class InvalidParameter(BqsgdError, ValueError):
    """An argument has the wrong type, or a value that the mechanism, the proof or the format does not allow."""


class NonFiniteInput(BqsgdError, ValueError):
    """An array holds NaN or infinity."""


class OutOfRange(BqsgdError, ValueError):
    """A value lies outside the encoder's range [-R, R], and `clamp=True` was not given."""


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
    """A header field has a value that no writer of this version produces."""


class WrongDimension(FrameError):
    """The frame holds more or fewer coordinates than the reader expects or allows."""


class WrongParameters(FrameError):
    """The frame was made with another mechanism or range than the reader expects."""


class WrongOrigin(FrameError):
    """The frame comes from another client or round than the reader expects."""


class CodeOutOfRange(FrameError):
    """A code is not below the mechanism's code count."""


class BadPayload(FrameError):
    """The payload is not what the coding in the header writes for the dimension in the header."""


class ModelMessageError(FrameError):
    """A client refused the server's model message; nothing was computed from it."""


class ModelNotHeld(ModelMessageError):
    """The message holds a change to a model that this client does not have; the server must send the whole model."""


class AccountingError(BqsgdError, ArithmeticError):
    """The accountant could not prove a bound (lost mass, overflow, no convergence), so it states none."""


class Infeasible(BqsgdError, ValueError):
    """No integer (levels, trials) meets the budget; the message names the nearest feasible trades."""


class BudgetExhausted(BqsgdError, RuntimeError):
    """The next message would exceed the client's privacy budget; nothing was sent.

    >>> issubclass(BudgetExhausted, BqsgdError)
    True
    """


class LedgerError(BqsgdError, RuntimeError):
    """A ledger is unreadable, belongs to another client or run, or could not be made durable."""


class UnsafeFile(BqsgdError, RuntimeError):
    """A file is a link, a pipe or a device, or larger than its limit, where a regular file is needed."""


class NotWritten(BqsgdError, OSError):
    """A file could not be written (full disk, no permission); the previous file is untouched."""


class FolderInUse(BqsgdError, RuntimeError):
    """Another process is writing this folder; nothing was spent."""


class DataUnavailable(BqsgdError, RuntimeError):
    """No source of a data set could be reached; the message lists the sources and what to do by hand."""


class SecureSumError(BqsgdError, RuntimeError):
    """A step of a secure sum was refused and nothing was revealed; each subclass names one reason."""


class BadSecureMessage(SecureSumError, ValueError):
    """The bytes are not a valid message of the expected kind (magic, version, kind, length or order of entries)."""


class WrongSession(SecureSumError):
    """The message belongs to another run, another roster or other settings of the sum."""


class WrongRound(SecureSumError):
    """The message is for another round than the current one: late, replayed or early."""


class ForeignClient(SecureSumError):
    """The message names a client that is not in the roster, or that has no part in this step."""


class BadSignature(SecureSumError):
    """A signature does not verify under the identity key that the roster has for the client."""


class ReplacedKeys(SecureSumError):
    """The server presented a client's keys twice for the same rounds, and they differ."""


class BadShares(SecureSumError):
    """Encrypted shares do not decrypt under the keys of sender and receiver, or contradict each other."""


class TooFewClients(SecureSumError):
    """Fewer clients take part than the threshold; continuing would reveal a sum over too few."""


class ConflictingSurvivors(SecureSumError):
    """The server sent two different lists of survivors for one round."""


class RoundUsed(SecureSumError):
    """The client has answered this round before; a second vector under the same masks would reveal a difference."""
