"""Every error that bitwright raises on purpose, on one screen.

    BitwrightError                  a user can act on it; the command line prints one sentence and exits with 2
    ├── UnknownName                 a name that no catalog has; the nearest name is suggested
    ├── MissingExtra                an optional package is absent; the message is the exact pip line
    ├── FormatError                 a number format or an operation on its codes is asked for what it cannot do
    ├── SchemeError                 a scheme does not fit the tensor it is applied to
    ├── ModelError                  a model cannot be read, or its weights are unusable
    ├── DataError                   calibration or evaluation text is missing, empty, or unusable
    ├── BudgetError                 limits that contradict each other or themselves
    ├── HardwareError               a device file is missing a figure or has an impossible one
    ├── PlanError                   a plan folder is damaged, from a newer schema, or for another model
    ├── CommsError                  a collective, a topology or a group of ranks that cannot be, or a peer that failed
    ├── TrainingError               a training run cannot be set up as asked, or cannot go on
    ├── ParallelError               a layout that cannot be, a cluster file that lacks a link
    ├── ExportError                 an engine's checkpoint cannot express a plan, or cannot be written
    └── ReportError                 a report cannot be drawn or written

Every message says the value, the rule it broke, and the next step. Whatever else escapes (AssertionError, IndexError …)
is a defect of bitwright and keeps its traceback.
"""

from __future__ import annotations


class BitwrightError(Exception):
    """Base of every error a user can act on."""


class UnknownName(BitwrightError):
    """A name that no catalog has."""


class MissingExtra(BitwrightError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}'; install it with: pip install 'bitwright[{extra}]'")
        self.package = package
        self.extra = extra


class FormatError(BitwrightError):
    """A number format is asked for what it cannot do."""


class SchemeError(BitwrightError):
    """A scheme does not fit the tensor it is applied to."""


class ModelError(BitwrightError):
    """A model cannot be read, or its weights are unusable."""


class DataError(BitwrightError):
    """Calibration or evaluation text is missing, empty, or unusable."""


class BudgetError(BitwrightError):
    """Limits that contradict each other or themselves."""


class HardwareError(BitwrightError):
    """A device file is missing a figure or has an impossible one."""


class PlanError(BitwrightError):
    """A plan folder is damaged, from a newer schema, or for another model."""


class CommsError(BitwrightError):
    """A collective, a topology or a group of ranks that cannot be, or a peer that failed."""


class TrainingError(BitwrightError):
    """A training run cannot be set up as asked, or cannot go on."""


class ParallelError(BitwrightError):
    """A model, a batch or a cluster cannot be divided as asked."""


class ExportError(BitwrightError):
    """An engine's checkpoint cannot express a plan, or cannot be written."""


class ReportError(BitwrightError):
    """A report cannot be drawn or written."""
