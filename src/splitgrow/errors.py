"""What can go wrong, one class per thing a caller may want to handle."""

from __future__ import annotations


class SplitgrowError(Exception):
    """Base of every error that splitgrow raises on purpose.

    A message names the place (a module path, an argument), the cause and the way out.
    """


class CaptureError(SplitgrowError):
    """The model could not be traced by ``torch.export``."""


class InputError(SplitgrowError, ValueError):
    """An argument of a public function is not usable; nothing was changed."""


class LossError(SplitgrowError):
    """The loss function returned something that cannot be differentiated or is not finite."""


class PlanError(SplitgrowError):
    """A plan or units made for a model of another shape."""


class OptimizerError(SplitgrowError):
    """The optimizer does not own the resized parameters, or its state cannot follow."""


class SplitRefused(SplitgrowError):
    """No step lowers the loss, or the surgery would not be exact; nothing was changed."""
