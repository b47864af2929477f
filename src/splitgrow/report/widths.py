"""Figure 2: the width of every layer over the phases."""

from __future__ import annotations

from dataclasses import dataclass

from splitgrow.report.history import Run
from splitgrow.show import count


@dataclass(frozen=True)
class Layer:
    """A layer and its width in every phase; None where the phase does not name it."""

    name: str
    widths: tuple[int | None, ...]


@dataclass(frozen=True)
class WidthFigure:
    """Figure 2, for one run."""

    finding: str
    phases: tuple[int, ...]
    layers: tuple[Layer, ...]


def width_figure(run: Run) -> WidthFigure:
    """The layers of a run in the order of the model."""
    names = dict.fromkeys(name for phase in run.phases for name in phase.widths)
    layers = tuple(Layer(name, tuple(p.widths.get(name) for p in run.phases)) for name in names)
    return WidthFigure(_finding(layers), tuple(p.number for p in run.phases), layers)


def growth(layer: Layer) -> tuple[int, int]:
    """The first and the last known width; (0, 0) where there is none."""
    known = [width for width in layer.widths if width is not None]
    return (known[0], known[-1]) if known else (0, 0)


def _finding(layers: tuple[Layer, ...]) -> str:
    if not layers:
        return "No layer can grow"
    gains = [after - before for before, after in map(growth, layers)]
    most = max(gains)
    if most <= 0:
        return "No layer has grown yet"
    if gains.count(most) == len(layers) > 1:
        return f"All {len(layers)} layers grew by {count(most, 'neuron')}"
    if gains.count(most) > 1:
        which = f"{gains.count(most)} of {len(layers)} layers"
        return f"{which} grew the most: by {count(most, 'neuron')} each"
    layer = layers[gains.index(most)]
    before, after = growth(layer)
    how = "grew" if len(layers) == 1 else "grew the most:"
    return f"Layer {layer.name} {how} from {before:,} to {after:,} neurons"
