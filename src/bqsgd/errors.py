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
    """A frame was refused; subclasses in `bqsgd.wire` name the reason."""


class AccountingError(BqsgdError, ArithmeticError):
    """The accountant could not prove a figure (lost mass, overflow, no convergence)."""


class Infeasible(BqsgdError, ValueError):
    """No integer (levels, trials) meets the budget; the message names the nearest feasible trades."""


class BudgetExhausted(BqsgdError, RuntimeError):
    """The next release would pass the client's privacy budget; nothing was sent."""


class LedgerError(BqsgdError, RuntimeError):
    """A ledger is unreadable, belongs to another client or run, or could not be made durable."""


class DataUnavailable(BqsgdError, RuntimeError):
    """No source of a data set answered; the message lists every source tried and what to do by hand."""
