"""Every exception that alchemi raises on purpose, in one tree.

    AlchemiError
    ├── InputError (ValueError)       the structure cannot be computed
    │   ├── UnsupportedElement        an element that the model was not trained on
    │   ├── NonFinitePosition         nan, inf, or too far out to have a meaningful distance
    │   └── InvalidCell               periodic along a vector that is missing or dependent
    ├── SpecError (ValueError)        a specification that contradicts itself or was not written by us
    ├── MissingHandler (RuntimeError) an operation that would be wrong on one rank's share
    ├── UntrustedPickle (RuntimeError)  a file that would run code when loaded
    └── RankFailure (RuntimeError)    a rank failed, died or no longer answers

Input, specification and loading errors are raised on every rank with one message; all survive pickling.
"""


class AlchemiError(Exception):
    """The root: `except AlchemiError` catches what this project raises on purpose."""


class InputError(AlchemiError, ValueError):
    """The structure cannot be computed as it is."""


class UnsupportedElement(InputError):
    """An element that the model does not know."""


class NonFinitePosition(InputError):
    """A coordinate that is nan, infinite, or so large that distances have lost their digits."""


class InvalidCell(InputError):
    """Periodic along a cell vector that is zero, not finite, or a combination of the others."""


class SpecError(AlchemiError, ValueError):
    """A specification that contradicts itself, or a file that is not one."""


class MissingHandler(AlchemiError, RuntimeError):
    """An operation whose result on one rank's rows would not be the result on all rows."""


class UntrustedPickle(AlchemiError, RuntimeError):
    """Loading this file runs code that is stored in it, and nobody said that it is trusted."""

    @classmethod
    def of(cls, name: object) -> "UntrustedPickle":
        """Make the error for the file `name`, with a message that says how to trust it."""
        return cls(
            f"{name} is a pickle: loading it runs whatever code is stored in it, which torch refuses by default.\n"
            f"If you trust where it comes from, pass trust_pickle=True (--trust-pickle at the command line)."
        )


class RankFailure(AlchemiError, RuntimeError):
    """A rank raised, died, or did not answer in time."""
