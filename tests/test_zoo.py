"""The zoo's networks have the shapes and sizes they claim, and can be trained."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from splitgrow import find_units, zoo

IMAGES = (2, 3, 32, 32)

# name: (build, shape of the inputs, shape of the outputs), every one at its default activation
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": (lambda: zoo.MLP((12, 8, 6, 3)), (2, 3, 2, 2), (2, 3)),
    "vgg19(16)": (lambda: zoo.vgg19(16), IMAGES, (2, 10)),
    "mobilenet_v1(16)": (lambda: zoo.mobilenet_v1(16), IMAGES, (2, 10)),
    "mobilenet_v2": (lambda: zoo.mobilenet_v2(num_classes=7), IMAGES, (2, 7)),
    "resnet": (lambda: zoo.ResNet((1, 2, 1), (4, 6, 8)), IMAGES, (2, 10)),
    "resnet bottleneck": (
        lambda: zoo.ResNet((1, 2), (8, 12), hidden=(2, 3), stem=4, block=zoo.Bottleneck),
        IMAGES,
        (2, 10),
    ),
    "preact_resnet": (lambda: zoo.PreActResNet((1, 2, 1), (4, 6, 8)), IMAGES, (2, 10)),
    "densenet": (lambda: zoo.DenseNet((2, 2), 8, 4, 8), IMAGES, (2, 10)),
    "senet": (lambda: zoo.SENet((4, 6), (2, 3)), IMAGES, (2, 10)),
    "unet": (lambda: zoo.UNet((4, 6, 8)), IMAGES, (2, 2, 32, 32)),
    "tcn": (lambda: zoo.TCN((4, 6)), (2, 1, 20), (2, 10)),
    "transformer": (lambda: zoo.Transformer(5, 7), (2, 7, 5), (2, 10)),
    "transformer gated": (
        lambda: zoo.Transformer(5, 7, activation=nn.SiLU, mlp=zoo.GatedFeedForward),
        (2, 7, 5),
        (2, 10),
    ),
    "transformer fused": (
        lambda: zoo.Transformer(5, 7, activation=nn.SiLU, mlp=zoo.FusedGatedFeedForward),
        (2, 7, 5),
        (2, 10),
    ),
    "prototypes": (lambda: zoo.PrototypeNet((4, 8, 3), 5), (2, 4), (2, 10)),
    "rbf": (lambda: zoo.RBFNet(1, 8), (2, 1), (2, 1)),
    "rbf sum": (lambda: zoo.RBFSumNet(3, 8, 2), (2, 3), (2, 2)),
}

every_model = pytest.mark.parametrize(
    ("build", "inputs", "outputs"), MODELS.values(), ids=MODELS.keys()
)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@every_model
def test_output_shape(
    build: Callable[[], nn.Module], inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    assert build().eval()(torch.randn(inputs)).shape == outputs


@every_model
def test_a_training_step_reaches_every_parameter(
    build: Callable[[], nn.Module], inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    model = build().train()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    (model(torch.randn(inputs)) - torch.randn(outputs)).square().mean().backward()
    optimizer.step()
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert p.grad is not None, name
        assert p.isfinite().all(), name
        assert p.grad.ne(0).any(), name
        assert not torch.equal(p, old), name


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (zoo.vgg19, 20_035_018),
        # 3*16*9 + 15*16*16*9 filters, 16 norms of 2*16, a classifier of 16*10 + 10
        (lambda: zoo.vgg19(16), 35_674),
        (zoo.mobilenet_v1, 3_217_226),
        # 3*32*9 stem, (32 + 12*16)*9 depthwise, (32 + 12*16)*16 pointwise,
        # norms of 2*(32 + 32 + 25*16), a classifier of 16*10 + 10
        (lambda: zoo.mobilenet_v1(16), 7_562),
        # as published for 1,000 classes, 3,504,872, less 1,280 weights and a bias for each of 990
        (zoo.mobilenet_v2, 3_504_872 - 990 * 1_281),
    ],
    ids=["vgg19", "vgg19(16)", "mobilenet_v1", "mobilenet_v1(16)", "mobilenet_v2"],
)
def test_number_of_parameters(build: Callable[[], nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        assert size(build()) == parameters


def test_vgg19_ends_in_one_pixel() -> None:
    with torch.device("meta"):
        model = zoo.vgg19()
        assert model.features(torch.empty(IMAGES)).shape == (2, 512, 1, 1)
        assert len([m for m in model.features if isinstance(m, nn.Conv2d)]) == 16


def test_mobilenet_v1_has_a_stem_of_32_and_the_width_everywhere_else() -> None:
    with torch.device("meta"):
        blocks = zoo.mobilenet_v1(16).blocks
    assert [b.depthwise[0].groups for b in blocks] == [32] + [16] * 12
    assert {b.pointwise[0].out_channels for b in blocks} == {16}


def test_both_radial_nets_are_the_same_function() -> None:
    linear, summed = zoo.RBFNet(2, 5, 3).double(), zoo.RBFSumNet(2, 5, 3).double()
    summed.load_state_dict(
        {"scale": linear.scale, "shift": linear.shift, "weight": linear.head.weight}
    )
    x = torch.randn(7, 2, dtype=torch.float64)
    torch.testing.assert_close(summed(x) + linear.head.bias, linear(x))


def test_both_gated_mlps_are_the_same_function() -> None:
    apart = zoo.GatedFeedForward(4, 3, nn.SiLU).double()
    fused = zoo.FusedGatedFeedForward(4, 3, nn.SiLU).double()
    with torch.no_grad():
        fused.gate_up.weight.copy_(torch.cat([apart.gate.weight, apart.up.weight]))
        fused.gate_up.bias.copy_(torch.cat([apart.gate.bias, apart.up.bias]))
        fused.down.load_state_dict(apart.down.state_dict())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(fused(x), apart(x))


def test_prototype_distances() -> None:
    points = torch.randn(6, 3, dtype=torch.float64)
    prototypes = torch.randn(4, 3, dtype=torch.float64)
    expected: Tensor = torch.cdist(points, prototypes)
    torch.testing.assert_close(zoo.euclidean_distances(points, prototypes), expected)
    torch.testing.assert_close(zoo.squared_distances(points, prototypes), expected**2)


def test_the_temporal_net_is_causal() -> None:
    model = zoo.TCN((3, 4)).eval()
    x = torch.randn(2, 1, 12)
    later = x.clone()
    later[:, :, 8:] += 1.0
    torch.testing.assert_close(model.blocks(x)[:, :, :8], model.blocks(later)[:, :, :8])


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Softplus, nn.SiLU, nn.Tanh, nn.PReLU])
def test_the_activation_is_the_users(activation: Callable[[], nn.Module]) -> None:
    model = zoo.VGG((4, "M", 6), activation=activation)
    assert len([m for m in model.modules() if isinstance(m, activation)]) == 2


def test_resnet50_has_the_published_size() -> None:
    small_stem, large_stem = 64 * 3 * 3 * 3, 64 * 3 * 7 * 7
    assert size(zoo.resnet50(1000)) - small_stem + large_stem == 25_557_032


@pytest.mark.slow
def test_every_layer_of_resnet50_but_the_last_can_be_split() -> None:
    units = find_units(zoo.resnet50(), torch.randn(2, 3, 32, 32))
    streams = {unit.name: unit.size for unit in units if "expand" in unit.name}
    # The stem, two units in each of the 16 blocks, and one residual stream in each of 4 stages.
    assert len(units) == 1 + 2 * 16 + 4
    assert streams == {  # the shortcut's filter and those of every block's last convolution
        "stages.0.0.expand.0": 64 + 3 * 64, "stages.1.0.expand.0": 256 + 4 * 128,
        "stages.2.0.expand.0": 512 + 6 * 256, "stages.3.0.expand.0": 1024 + 3 * 512,
    }  # fmt: skip
    assert [skipped.name for skipped in units.skipped] == ["classifier"]
