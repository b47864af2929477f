"""The three maps of a convolution, where they go another way than PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splitgrow.convolution import Geometry

DEPTHWISE = {  # images (height, width), filter, stride, padding, dilation
    "same size": ((6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    "no padding": ((6, 5), (3, 2), (1, 1), (0, 0), (1, 1)),
    "far apart": ((7, 9), (3, 3), (1, 1), (2, 1), (2, 3)),
    "more padding than the filter reaches": ((4, 4), (2, 2), (1, 1), (2, 2), (1, 1)),
    "halved": ((7, 6), (3, 3), (2, 2), (1, 1), (1, 1)),
    "two rows": ((2, 2), (3, 3), (1, 1), (1, 1), (1, 1)),
    "one row, far apart": ((1, 4), (3, 3), (1, 1), (2, 2), (2, 2)),
    "two rows, halved": ((2, 3), (3, 3), (2, 2), (1, 1), (1, 1)),
    "a row, in one dimension": ((2,), (3,), (1,), (1,), (1,)),
    "in three dimensions": ((2, 3, 4), (3, 2, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1)),
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


@pytest.mark.parametrize("case", DEPTHWISE)
def test_derivatives_of_depthwise_convolutions(case: str) -> None:
    sizes, filters, stride, padding, dilation = DEPTHWISE[case]
    geometry = Geometry(stride, padding, dilation, False, (0,) * len(sizes), 5)
    x = drawn(3, 5, *sizes).requires_grad_()
    w = drawn(5, 1, *filters).requires_grad_()
    with torch.enable_grad():
        plain = torch.ops.aten.convolution(x, w, None, *geometry._rest)
    y = drawn(*plain.shape)
    by_x, by_w = torch.autograd.grad(plain, (x, w), y)
    torch.testing.assert_close(geometry.by_input(y, x.detach(), w.detach()), by_x)
    torch.testing.assert_close(geometry.by_weight(y, x.detach(), w.detach()), by_w)
