"""Fresh weights for a net that has grown or was cut."""

from __future__ import annotations

from torch import nn

from splitgrow.errors import InputError


def check_resettable(model: nn.Module) -> None:
    """Can every parameter be drawn anew?"""
    stuck = [
        f"{path or 'the model itself'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and not callable(getattr(module, "reset_parameters", None))
    ]
    if stuck:
        raise InputError(
            'policy: after="retrain" needs a reset_parameters() on every module that has '
            f"parameters; missing on {', '.join(stuck[:5])}{', ...' if len(stuck) > 5 else ''}."
        )


def reset(model: nn.Module) -> None:
    """Draw every parameter anew, in place."""
    for module in model.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]
