"""The exceptions of Carillon. They are for our own faults: what a *target* does is an `Outcome`, never an exception.

    CarillonError
      ConfigError          start-up refused: a setting is wrong                   exit 2
      SchemaMismatch       start-up refused: the database has another schema      exit 3
      StoreError
        StoreUnavailable   connection lost, time-out, deadlock: loops back off    API 503
        PartitionMissing   the month is not there yet; maintenance was asked      API 503
        RowRefused         the database refuses the data itself; halve the batch
        Conflict           an expected unique violation                           API 409
      NotFound             unknown here, or another tenant's: the same answer     API 404
      InvalidInput         a value is outside what is allowed; names its field    API 422
      LeaseLost            raised only inside `keeper.hold`

Every class's docstring is one sentence and serves as its default message.
"""

from __future__ import annotations


class CarillonError(Exception):
    """Something in Carillon went wrong."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class ConfigError(CarillonError):
    """The configuration is not usable."""


class SchemaMismatch(CarillonError):
    """The database schema does not fit this version of Carillon."""


class StoreError(CarillonError):
    """The database could not do what was asked."""


class StoreUnavailable(StoreError):
    """The database did not answer, or asked for the transaction to be repeated."""


class PartitionMissing(StoreError):
    """The month of this instant has no partition yet; maintenance has been asked for it."""


class RowRefused(StoreError):
    """The database refuses a row because of what is in it."""


class Conflict(StoreError):
    """This exists already, or was changed meanwhile."""


class NotFound(CarillonError):
    """There is nothing with this id."""


class InvalidInput(CarillonError):
    """A value is outside what is allowed.

    `field` is the dotted path of the value as the caller wrote it (``recurrence.cron``), so that the
    error can point at it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.problem = message


class LeaseLost(CarillonError):
    """The lease on this run is no longer ours."""
