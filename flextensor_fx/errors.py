"""Errors a user can meet. Each message says who, what was expected, what was found and what to change."""

from __future__ import annotations


class OffloadError(ValueError):
    """Base of all errors caused by what the user asked for."""


class ConfigError(OffloadError):
    """A configuration value or name that cannot be used."""


class PatternError(ConfigError):
    """A malformed include or exclude pattern."""


class SelectionError(OffloadError):
    """The patterns select nothing, or something that cannot be offloaded."""


class BudgetError(OffloadError):
    """A budget under which no schedule exists.

    Attributes:
        least: the least budget that works, in bytes.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


class GradientError(OffloadError, RuntimeError):
    """A gradient was asked for that a streamed weight cannot receive."""


class ReportError(OffloadError):
    """A report file that cannot be read or written."""


class ProfileError(OffloadError):
    """A profile that cannot be read, written or used: damaged, or of another model or machine than asked for."""


class ProgramError(OffloadError):
    """A program file that cannot be written, read or used: damaged, altered, or of another release."""


class LoadError(OffloadError):
    """Weights that do not fit the model that they are loaded into, or that cannot be found."""


class StoreError(RuntimeError):
    """A weight could not be written to, or read from, its store."""
