"""Seven keyword spotters for MFCCs (B, 1, 49, 10), each at its largest size (Zhang et al., 2017).

The sizes are those of the L models of "Hello Edge: Keyword Spotting on Microcontrollers"; at the
defaults each net has exactly the parameters of its TensorFlow original, and `operations` comes to
the published figure:

=========  ==========  ==========
net        parameters  operations
=========  ==========  ==========
DNN           495,744     990,168
CNN           476,734  25,295,206
BasicLSTM     492,620  47,879,308
LSTM          495,768  48,367,524
GRU           498,012  48,382,412
CRNN          485,004  19,315,928
DS-CNN        413,736  56,904,036
=========  ==========  ==========

The two batch norms of the original differ: that of its CNN has scale and shift and stands behind a
convolution with bias, so does ours; that of its DS-CNN has a shift only and stands behind a
convolution with bias, ours has scale and shift behind a convolution without, which is as many.
The gates of a recurrent cell have one bias, not the two of `torch.nn`, and the GRU resets the state
before the product with the weights, not after it; hence cells of our own.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.errors import InputError
from splitgrow.state import eval_mode
from splitgrow.zoo.layers import conv_norm_act
from splitgrow.zoo.mlp import MLP

SHAPE = (49, 10)  # frames of 40 ms every 20 ms in one second, MFCCs of each
NUM_CLASSES = 12  # ten words, silence, unknown

DS_CNN_WIDTHS = (276,) * 6

# (time, frequency) stride of the first convolution and of each depthwise layer
DS_CNN_STRIDES = ((2, 1), (2, 2), (1, 1), (1, 1), (1, 1), (1, 1))


# --- without recurrence -------------------------------------------------------------------


class DNN(nn.Module):
    """A perceptron on every second frame: 25 of the 49, those of a stride of 40 ms."""

    def __init__(
        self,
        widths: Sequence[int] = (436, 436, 436),
        shape: tuple[int, int] = SHAPE,
        num_classes: int = NUM_CLASSES,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        frames, coefficients = shape
        inputs = (frames + 1) // 2 * coefficients
        self.mlp = MLP((inputs, *widths, num_classes), activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map MFCCs (B, 1, T, F) to logits (B, num_classes)."""
        return self.mlp(x[:, :, ::2])


class CNN(nn.Module):
    """Two 10x4 convolutions, a low-rank linear layer, a hidden layer, a linear layer.

    The second convolution has stride 2 in time; neither is padded. `widths` are the channels of
    both, `rank` those of the linear layer without activation behind them, `hidden` those of the
    next.
    """

    def __init__(
        self,
        widths: tuple[int, int] = (60, 76),
        rank: int = 58,
        hidden: int = 128,
        shape: tuple[int, int] = SHAPE,
        num_classes: int = NUM_CLASSES,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        first, second = widths
        self.features = nn.Sequential(
            nn.Conv2d(1, first, (10, 4)),
            nn.BatchNorm2d(first),
            activation(),
            nn.Conv2d(first, second, (10, 4), stride=(2, 1)),
            nn.BatchNorm2d(second),
            activation(),
        )
        frames, coefficients = shape
        positions = ((frames - 19) // 2 + 1) * (coefficients - 6)
        self.head = nn.Sequential(
            nn.Linear(second * positions, rank),
            nn.Linear(rank, hidden),
            nn.BatchNorm1d(hidden),
            activation(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map MFCCs (B, 1, T, F) to logits (B, num_classes)."""
        return self.head(self.features(x).flatten(1))


class SamePad(nn.Module):
    """Zeros around the image so that a convolution gives ceil(size / stride) positions.

    Of an odd number of zeros the extra one comes last, which no `padding` of `nn.Conv2d` can say.
    """

    def __init__(self, kernel_size: tuple[int, int], stride: tuple[int, int]) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H + zeros, W + zeros)."""
        amounts: list[int] = []
        for dim in (1, 0):  # `pad` takes the last dimension first
            kernel, stride, size = self.kernel_size[dim], self.stride[dim], x.shape[2 + dim]
            zeros = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            amounts += [zeros // 2, zeros - zeros // 2]
        return F.pad(x, amounts)


def _same_conv_norm_act(
    in_channels: int,
    out_channels: int,
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    activation: Callable[[], nn.Module],
    groups: int = 1,
) -> nn.Sequential:
    """Padding, convolution without bias, batch norm, activation."""
    return nn.Sequential(
        SamePad(kernel_size, stride),
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        activation(),
    )


class DSBlock(nn.Module):
    """Depthwise 3x3 then pointwise 1x1 convolution, each with batch norm and activation."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: tuple[int, int],
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.depthwise = _same_conv_norm_act(
            in_channels, in_channels, (3, 3), stride, activation, groups=in_channels
        )
        self.pointwise = conv_norm_act(in_channels, out_channels, 1, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, T, F) to (B, out_channels, T / stride, F / stride)."""
        return self.pointwise(self.depthwise(x))


class DSCNN(nn.Module):
    """DS-CNN: a 10x4 convolution, five depthwise-separable blocks, average, linear layer.

    `widths` are the channels behind the convolution and behind each block. A neuron runs from a
    filter of the first convolution, or a pointwise one, through the depthwise filter of the next
    block up to the next pointwise convolution; those of the last block end in the linear layer.
    """

    def __init__(
        self,
        widths: Sequence[int] = DS_CNN_WIDTHS,
        num_classes: int = NUM_CLASSES,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        _check_widths(widths)
        self.stem = _same_conv_norm_act(1, widths[0], (10, 4), DS_CNN_STRIDES[0], activation)
        self.blocks = nn.Sequential(
            *(
                DSBlock(fan_in, width, stride, activation)
                for fan_in, width, stride in zip(
                    widths[:-1], widths[1:], DS_CNN_STRIDES[1:], strict=True
                )
            )
        )
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map MFCCs (B, 1, T, F) to logits (B, num_classes)."""
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


def _check_widths(widths: Sequence[int]) -> None:
    count = len(DS_CNN_STRIDES)
    if len(widths) != count or min(widths) < 1:
        raise InputError(
            f"widths: expected {count} positive numbers, the channels of the first convolution and "
            f"of {count - 1} blocks, got {list(widths)}. For 16 everywhere: [16] * {count}."
        )


# --- recurrent cells ----------------------------------------------------------------------


class Cell(nn.Module):
    """One step of a recurrent layer: (input, state) to the next state, whose first part is read.

    `elementwise` is the number of products and sums of single numbers in a step; what linear
    layers do is not among them.
    """

    def __init__(self, sizes: tuple[int, ...], elementwise: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.elementwise = elementwise

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        """Zeros, a tensor (B, size) for each part of the state."""
        return tuple(x.new_zeros(len(x), size) for size in self.sizes)


class LSTMCell(Cell):
    """The plain cell, with state (h, c) of `hidden` numbers each.

    (i, g, f, o) = W [x, h] + b;  c' = s(f) c + s(i) tanh(g);  h' = s(o) tanh(c'), s the sigmoid.
    The bias of f starts at 1, the others at 0.
    """

    def __init__(self, in_features: int, hidden: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__((hidden, hidden), elementwise=4 * hidden)
        self.gates = nn.Linear(in_features + hidden, 4 * hidden)
        self.activation = activation()
        _start_lstm(self.gates)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Map (B, in_features) and (h, c) to the next (h, c)."""
        h, c = state
        i, g, f, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)  # (B, hidden) each
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * self.activation(g)
        return torch.sigmoid(o) * self.activation(c), c


class ProjectedLSTMCell(Cell):
    """The cell with peepholes and a projection, with state (h, c) of `projection` and `hidden`.

    (i, g, f, o) = W [x, h] + b;  c' = s(f + p_f c) c + s(i + p_i c) tanh(g);
    h' = P (s(o + p_o c') tanh(c')): `peepholes` p is (3, hidden), in the order i, f, o, and the
    projection P has no bias. The bias of f starts at 1, the others at 0.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        projection: int,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__((projection, hidden), elementwise=10 * hidden)
        self.gates = nn.Linear(in_features + projection, 4 * hidden)
        self.peepholes = nn.Parameter(torch.empty(3, hidden))
        self.projection = nn.Linear(hidden, projection, bias=False)
        self.activation = activation()
        _start_lstm(self.gates)
        bound = (3 / hidden) ** 0.5  # Glorot's for a vector of `hidden`
        nn.init.uniform_(self.peepholes, -bound, bound)
        nn.init.xavier_uniform_(self.projection.weight)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Map (B, in_features) and (h, c) to the next (h, c)."""
        h, c = state
        p_i, p_f, p_o = self.peepholes
        i, g, f, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)  # (B, hidden) each
        c = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * self.activation(g)
        return self.projection(torch.sigmoid(o + p_o * c) * self.activation(c)), c


class GRUCell(Cell):
    """The gated recurrent unit of Cho et al. (2014), with state h of `hidden` numbers.

    (r, u) = s(W [x, h] + b);  g = tanh(V [x, r h] + d);  h' = u h + (1 - u) g, s the sigmoid.
    The biases b start at 1, d at 0.
    """

    def __init__(self, in_features: int, hidden: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__((hidden,), elementwise=5 * hidden)
        self.gates = nn.Linear(in_features + hidden, 2 * hidden)
        self.candidate = nn.Linear(in_features + hidden, hidden)
        self.activation = activation()
        nn.init.xavier_uniform_(self.gates.weight)
        nn.init.xavier_uniform_(self.candidate.weight)
        nn.init.ones_(self.gates.bias)
        nn.init.zeros_(self.candidate.bias)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Map (B, in_features) and (h,) to the next (h,)."""
        (h,) = state
        r, u = torch.sigmoid(self.gates(torch.cat([x, h], 1))).chunk(2, 1)  # (B, hidden) each
        g = self.activation(self.candidate(torch.cat([x, r * h], 1)))
        return (u * h + (1 - u) * g,)


def _start_lstm(gates: nn.Linear) -> None:
    """Glorot's weights, and biases of the gates (i, g, f, o) that keep the memory at first."""
    nn.init.xavier_uniform_(gates.weight)
    with torch.no_grad():
        gates.bias.view(4, -1).copy_(gates.bias.new_tensor([[0.0], [0.0], [1.0], [0.0]]))


class Recurrent(nn.Module):
    """A cell applied to one frame after the other."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, in_features) to (B, T, out_features)."""
        state = self.cell.start(x)
        outputs: list[Tensor] = []
        for frame in x.unbind(1):
            state = self.cell(frame, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1)


# --- recurrent nets -----------------------------------------------------------------------


class BasicLSTM(nn.Module):
    """A plain LSTM over the frames, a linear layer on its last output."""

    def __init__(
        self,
        hidden: int = 344,
        coefficients: int = SHAPE[1],
        num_classes: int = NUM_CLASSES,
        activation: Callable[[], nn.Module] = nn.Tanh,
    ) -> None:
        super().__init__()
        self.layer = Recurrent(LSTMCell(coefficients, hidden, activation))
        self.classifier = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map MFCCs (B, 1, T, F) to logits (B, num_classes)."""
        return self.classifier(self.layer(x.squeeze(1))[:, -1])


class LSTM(nn.Module):
    """An LSTM with peepholes and projection over the frames, a linear layer on its last output."""

    def __init__(
        self,
        hidden: int = 500,
        projection: int = 188,
        coefficients: int = SHAPE[1],
        num_classes: int = NUM_CLASSES,
        activation: Callable[[], nn.Module] = nn.Tanh,
    ) -> None:
        super().__init__()
        self.layer = Recurrent(ProjectedLSTMCell(coefficients, hidden, projection, activation))
        self.classifier = nn.Linear(projection, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map MFCCs (B, 1, T, F) to logits (B, num_classes)."""
        return self.classifier(self.layer(x.squeeze(1))[:, -1])


class GRU(nn.Module):
    """A GRU over the frames, a linear layer on its last output."""

    def __init__(
        self,
        hidden: int = 400,
        coefficients: int = SHAPE[1],
        num_classes: int = NUM_CLASSES,
        activation: Callable[[], nn.Module] = nn.Tanh,
    ) -> None:
        super().__init__()
        self.layer = Recurrent(GRUCell(coefficients, hidden, activation))
        self.classifier = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map MFCCs (B, 1, T, F) to logits (B, num_classes)."""
        return self.classifier(self.layer(x.squeeze(1))[:, -1])


class CRNN(nn.Module):
    """A 10x4 convolution with stride 2 in time, two GRUs, a hidden layer, a linear layer.

    `channels` are those of the convolution (not padded, no batch norm), `recurrent` the neurons of
    each GRU, which keep their tanh whatever the `activation`, and `hidden` those behind them.
    """

    def __init__(
        self,
        channels: int = 100,
        recurrent: tuple[int, int] = (136, 136),
        hidden: int = 188,
        coefficients: int = SHAPE[1],
        num_classes: int = NUM_CLASSES,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        first, second = recurrent
        self.conv = nn.Conv2d(1, channels, (10, 4), stride=(2, 1))
        self.activation = activation()
        self.layers = nn.Sequential(
            Recurrent(GRUCell(channels * (coefficients - 3), first, nn.Tanh)),
            Recurrent(GRUCell(first, second, nn.Tanh)),
        )
        self.head = nn.Sequential(
            nn.Linear(second, hidden), activation(), nn.Linear(hidden, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map MFCCs (B, 1, T, F) to logits (B, num_classes)."""
        y = self.activation(self.conv(x))  # (B, channels, frames, positions)
        return self.head(self.layers(y.transpose(1, 2).flatten(2))[:, -1])


HELLO_EDGE: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "DNN": DNN,
        "CNN": CNN,
        "BasicLSTM": BasicLSTM,
        "LSTM": LSTM,
        "GRU": GRU,
        "CRNN": CRNN,
        "DS-CNN": DSCNN,
    }
)


# --- operations ---------------------------------------------------------------------------


def operations(net: nn.Module, example: Tensor) -> int:
    """Operations per sample as "Hello Edge" counts them, of a net of this file, grown or not.

    An output of a convolution or linear layer costs 2 * fan_in + 1: two operations per
    multiply-accumulate, one for the bias, be it the layer's own or that of the batch norm that is
    folded into it (a linear layer with neither: 2 * fan_in). A recurrent cell adds its element-wise
    products and sums at each step. Activations and pooling count 0.

    `splitgrow.CostModel` counts the multiply-accumulates alone, those of our cells included: twice
    its macs is this figure less the biases and the element-wise operations (0.1 to 0.7% here).
    """
    total = 0

    def count(module: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> None:
        nonlocal total
        total += _operations_of(module, output)

    hooks = [module.register_forward_hook(count) for module in net.modules()]
    try:
        with eval_mode(net), torch.no_grad():
            net(example)
    finally:
        for hook in hooks:
            hook.remove()
    return total // len(example)


def _operations_of(module: nn.Module, output: Tensor | tuple[Tensor, ...]) -> int:
    """Operations of one call of a module, those of its children left out."""
    if isinstance(module, Cell):
        return len(output[0]) * module.elementwise
    if isinstance(module, nn.Conv2d | nn.Linear) and isinstance(output, Tensor):
        biased = isinstance(module, nn.Conv2d) or module.bias is not None
        return output.numel() * (2 * module.weight[0].numel() + biased)
    return 0
