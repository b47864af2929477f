"""The keyword spotters have the published sizes, compute what they claim, and can be trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import splitgrow as sg
from helpers_split import split_at_zero
from splitgrow.zoo import kws

MFCCS = (4, 1, 49, 10)
DISTINCT = (3, 4, 5, 6, 7, 8)

# name: parameters, operations, and both as Table 1 prints them (in thousands and in millions)
PUBLISHED = {
    "DNN": (495_744, 990_168, 495.7, 1.0),
    "CNN": (476_734, 25_295_206, 476.7, 25.3),
    "BasicLSTM": (492_620, 47_879_308, 492.6, 47.9),
    "LSTM": (495_768, 48_367_524, 495.8, 48.4),
    "GRU": (498_012, 48_382_412, 498.0, 48.4),
    "CRNN": (485_004, 19_315_928, 485.0, 19.3),
    "DS-CNN": (413_736, 56_904_036, 413.7, 56.9),
}

# name: a small net, and its operations per sample beyond two per multiply-accumulate
SMALL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "DNN": (lambda: kws.DNN((5, 6)), 5 + 6 + 12),
    "CNN": (lambda: kws.CNN((3, 4), 5, 6), 3 * 40 * 7 + 4 * 16 * 4 + 5 + 6 + 12),
    "BasicLSTM": (lambda: kws.BasicLSTM(4), 49 * (4 + 4) * 4 + 12),
    "LSTM": (lambda: kws.LSTM(5, 3), 49 * (4 + 10) * 5 + 12),
    "GRU": (lambda: kws.GRU(4), 49 * (3 + 5) * 4 + 12),
    "CRNN": (lambda: kws.CRNN(2, (3, 4), 5), 2 * 20 * 7 + 20 * 8 * (3 + 4) + 5 + 12),
    "DS-CNN": (
        lambda: kws.DSCNN(DISTINCT),
        3 * 250 + (3 + 2 * (4 + 5 + 6 + 7) + 8) * 65 + 12,
    ),
}

every_net = pytest.mark.parametrize("name", PUBLISHED)


def size(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# --- sizes --------------------------------------------------------------------------------


def test_every_net_has_its_row() -> None:
    assert list(kws.HELLO_EDGE) == list(PUBLISHED) == list(SMALL)


@every_net
def test_parameters_and_operations_are_the_published_ones(name: str) -> None:
    net = kws.HELLO_EDGE[name]()
    params, operations, thousands, millions = PUBLISHED[name]
    assert size(net) == params
    assert round(params / 1e3, 1) == thousands
    assert kws.operations(net, torch.randn(2, 1, 49, 10)) == operations
    assert round(operations / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("name", "params", "operations"), [(k, *v[:2]) for k, v in PUBLISHED.items()]
)
def test_the_documented_table(name: str, params: int, operations: int) -> None:
    rows = [line.split() for line in (kws.__doc__ or "").splitlines()]
    assert [name, f"{params:,}", f"{operations:,}"] in rows


@every_net
def test_output_shape(name: str) -> None:
    build, _ = SMALL[name]
    assert build().eval()(torch.randn(MFCCS)).shape == (4, 12)


# --- operations ---------------------------------------------------------------------------


@every_net
def test_operations_are_twice_the_macs_and_the_rest(name: str) -> None:
    build, rest = SMALL[name]
    net, x = build(), torch.randn(MFCCS)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(x)
    assert kws.operations(net, x) == counter.get_total_flops() // len(x) + rest
    macs = sg.CostModel(sg.find_units(net, x)).total().macs
    assert kws.operations(net, x) == 2 * macs + rest


def test_counting_leaves_the_net_as_it_was() -> None:
    net, x = kws.DSCNN([2] * 6).train(), torch.randn(MFCCS)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    kws.operations(net, x)
    assert all(module.training for module in net.modules())
    assert not any(module._forward_hooks for module in net.modules())
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_counting_that_fails_leaves_no_hooks() -> None:
    net = kws.GRU(3)
    with pytest.raises(RuntimeError):
        kws.operations(net, torch.randn(2, 1, 49, 7))
    assert not any(module._forward_hooks for module in net.modules())


# --- training -----------------------------------------------------------------------------


@every_net
def test_a_gradient_step_reaches_every_parameter_and_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    net = kws.HELLO_EDGE[name]()
    x, labels = torch.randn(16, *MFCCS[1:]), torch.randint(12, (16,))
    before = F.cross_entropy(net(x), labels)
    before.backward()
    for path, p in net.named_parameters():
        assert p.grad is not None, path
        assert p.grad.isfinite().all(), path
        assert p.grad.ne(0).any(), path
    torch.optim.SGD(net.parameters(), lr=1e-2).step()
    with torch.no_grad():
        assert F.cross_entropy(net(x), labels) < before


# --- layers -------------------------------------------------------------------------------


def test_the_dnn_reads_every_second_frame() -> None:
    net, x = kws.DNN((5,)), torch.randn(MFCCS)
    odd, even = x.clone(), x.clone()
    odd[:, :, 1::2] += 1.0
    even[:, :, 48] += 1.0
    assert torch.equal(net(odd), net(x))
    assert not torch.equal(net(even), net(x))


@pytest.mark.parametrize(
    ("kernel", "stride", "image", "zeros"),  # zeros: left, right, top, bottom
    [
        ((10, 4), (2, 1), (49, 10), (1, 2, 4, 5)),
        ((3, 3), (2, 2), (25, 10), (0, 1, 1, 1)),
        ((3, 3), (1, 1), (13, 5), (1, 1, 1, 1)),
        ((1, 2), (3, 4), (8, 11), (0, 0, 0, 0)),  # strides beyond the kernel
    ],
)
def test_same_padding(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    image: tuple[int, int],
    zeros: tuple[int, ...],
) -> None:
    x = torch.randn(2, 3, *image)
    assert torch.equal(kws.SamePad(kernel, stride)(x), F.pad(x, zeros))


def test_positions_of_ds_cnn() -> None:
    net, x = kws.DSCNN(DISTINCT).eval(), torch.randn(MFCCS)
    y = net.stem(x)
    assert y.shape == (4, 3, 25, 10)
    for block, width in zip(net.blocks, DISTINCT[1:], strict=True):
        y = block(y)
        assert y.shape == (4, width, 13, 5)


def as_torchs(weight: Tensor, bias: Tensor, inputs: int) -> dict[str, Tensor]:
    """The joint weight on [x, h] and the one bias as the parameters of a layer of torch's."""
    return {
        "weight_ih_l0": weight[:, :inputs],
        "weight_hh_l0": weight[:, inputs:],
        "bias_ih_l0": bias,
        "bias_hh_l0": torch.zeros_like(bias),
    }


def lstm_as_torchs(gates: nn.Linear, inputs: int) -> dict[str, Tensor]:
    """Ours are in the order (i, g, f, o), torch's in (i, f, g, o)."""
    i, g, f, o = torch.cat([gates.weight, gates.bias[:, None]], 1).chunk(4)
    joined = torch.cat([i, f, g, o])
    return as_torchs(joined[:, :-1], joined[:, -1], inputs)


def test_the_plain_lstm_is_torchs() -> None:
    cell = kws.LSTMCell(3, 5, nn.Tanh).double()
    theirs = nn.LSTM(3, 5, batch_first=True).double()
    theirs.load_state_dict(lstm_as_torchs(cell.gates, 3))
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(kws.Recurrent(cell)(x), theirs(x)[0])


def test_the_projected_lstm_without_peepholes_is_torchs() -> None:
    cell = kws.ProjectedLSTMCell(3, 5, 2, nn.Tanh).double()
    theirs = nn.LSTM(3, 5, proj_size=2, batch_first=True).double()
    nn.init.zeros_(cell.peepholes)
    theirs.load_state_dict(
        {**lstm_as_torchs(cell.gates, 3), "weight_hr_l0": cell.projection.weight}
    )
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(kws.Recurrent(cell)(x), theirs(x)[0])


def test_peepholes_by_hand() -> None:
    """One neuron that reads nothing but its own memory: i and f the old one, o the new one."""
    cell = kws.ProjectedLSTMCell(1, 1, 1, nn.Tanh).double()
    p_i, p_f, p_o = 0.3, -0.7, 1.1
    with torch.no_grad():
        cell.gates.weight.zero_()
        cell.gates.bias.copy_(torch.tensor([0.2, 0.5, -0.4, 0.1]))
        cell.peepholes.copy_(torch.tensor([[p_i], [p_f], [p_o]]))
        cell.projection.weight.fill_(2.0)
    x, old = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 0.6, dtype=torch.float64)
    h, c = cell(x, (x, old))
    i, f = torch.sigmoid(0.2 + p_i * old), torch.sigmoid(-0.4 + p_f * old)
    expected = f * old + i * torch.tanh(torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(c, expected, rtol=1e-6, atol=0)
    output = 2.0 * torch.sigmoid(0.1 + p_o * expected) * torch.tanh(expected)
    torch.testing.assert_close(h, output, rtol=1e-6, atol=0)


def test_the_gru_that_never_resets_is_torchs() -> None:
    """With r = 1 it is the same before and after the product."""
    cell = kws.GRUCell(3, 5, nn.Tanh).double()
    theirs = nn.GRU(3, 5, batch_first=True).double()
    with torch.no_grad():
        cell.gates.bias[:5] = 1e3
    weight = torch.cat([cell.gates.weight, cell.candidate.weight])
    bias = torch.cat([cell.gates.bias, cell.candidate.bias])
    theirs.load_state_dict(as_torchs(weight, bias, 3))
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(kws.Recurrent(cell)(x), theirs(x)[0])


def test_the_gru_resets_the_state_before_the_product() -> None:
    cell = kws.GRUCell(3, 5, nn.Tanh).double()
    x, h = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    with torch.no_grad():
        cell.gates.bias[:5] = -1e3  # r = 0: the candidate sees the input alone
        cell.gates.bias[5:] = -1e3  # u = 0: the next state is the candidate
        cell.candidate.bias.fill_(0.3)
    (new,) = cell(x, (h,))
    torch.testing.assert_close(new, torch.tanh(x @ cell.candidate.weight[:, :3].T + 0.3))


@pytest.mark.parametrize(
    ("cell", "bias"),
    [
        (kws.LSTMCell(3, 2, nn.Tanh), [0, 0, 0, 0, 1, 1, 0, 0]),
        (kws.ProjectedLSTMCell(3, 2, 4, nn.Tanh), [0, 0, 0, 0, 1, 1, 0, 0]),
        (kws.GRUCell(3, 2, nn.Tanh), [1, 1, 1, 1]),
    ],
    ids=["lstm", "projected", "gru"],
)
def test_biases_at_the_start(cell: nn.Module, bias: list[int]) -> None:
    assert cell.get_parameter("gates.bias").tolist() == bias


# --- growing DS-CNN -----------------------------------------------------------------------


def test_units_of_ds_cnn() -> None:
    net = kws.DSCNN(DISTINCT, activation=nn.Softplus)
    units = sg.find_units(net, torch.randn(MFCCS))
    firsts = ["stem.1", *(f"blocks.{i}.pointwise.0" for i in range(5))]
    norms = ["stem.2", *(f"blocks.{i}.pointwise.1" for i in range(5))]
    assert [(unit.name, unit.width) for unit in units] == list(zip(firsts, DISTINCT, strict=True))
    assert [skipped.name for skipped in units.skipped] == ["classifier"]
    for i, unit in enumerate(units):
        through = [f"blocks.{i}.depthwise.1"] if i < 5 else []
        copied = [norms[i], *(f"blocks.{i}.depthwise.2" for _ in through)]
        reader = f"blocks.{i}.pointwise.0" if i < 5 else "classifier"
        assert [slot.name for slot in unit.theta] == [f"{m}.weight" for m in [firsts[i], *through]]
        assert [slot.name for slot in unit.consumers] == [f"{reader}.weight"]
        assert {slot.name.rpartition(".")[0] for slot in unit.copies} == set(copied)


def test_a_split_of_every_unit_keeps_the_outputs() -> None:
    net, x = kws.DSCNN(DISTINCT).double().eval(), torch.randn(MFCCS, dtype=torch.float64)
    expected = net(x)
    units = sg.find_units(net, x)
    split_at_zero(net, units, {unit.name: [0] for unit in units})
    torch.testing.assert_close(net(x), expected)
    wider = kws.DSCNN([width + 1 for width in DISTINCT])
    assert size(net) == size(wider)
    assert kws.operations(net, x) == kws.operations(wider.double(), x)


@pytest.mark.parametrize("widths", [[16] * 6, DISTINCT, (1,) * 6])
def test_widths_of_ds_cnn(widths: Sequence[int]) -> None:
    net = kws.DSCNN(widths, num_classes=5)
    assert net(torch.randn(MFCCS)).shape == (4, 5)
    convolutions = [m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert convolutions[:1] + convolutions[2::2] == list(widths)
    assert convolutions[1::2] == list(widths[:-1])


@pytest.mark.parametrize("widths", [[], [16] * 5, [16] * 7, [16, 16, 0, 16, 16, 16]])
def test_wrong_widths(widths: list[int]) -> None:
    with pytest.raises(sg.InputError, match="expected 6 positive numbers") as error:
        kws.DSCNN(widths)
    assert str(widths) in str(error.value)


@pytest.mark.parametrize("build", [lambda a: kws.DSCNN([2] * 6, activation=a),
                                   lambda a: kws.DNN([2] * 3, activation=a),
                                   lambda a: kws.CRNN(2, (2, 2), 2, activation=a)])  # fmt: skip
def test_the_activation_is_the_users(build: Callable[[Callable[[], nn.Module]], nn.Module]) -> None:
    net = build(nn.SiLU)
    assert any(isinstance(m, nn.SiLU) for m in net.modules())
    assert not any(isinstance(m, nn.ReLU) for m in net.modules())
