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


class CheckpointError(SplitgrowError):
    """A checkpoint cannot be read or written, or does not fit; nothing was changed."""


class RankError(SplitgrowError):
    """Another process failed, or the processes of a group do not do or hold the same."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a run after the current batch; ``run_dir`` is where it can be resumed from."""

    def __init__(self, message: str, run_dir: object) -> None:
        super().__init__(message)
        self.run_dir = run_dir


class ExportError(SplitgrowError):
    """A model cannot be exported, or its file does not compute the same; no file was written."""
