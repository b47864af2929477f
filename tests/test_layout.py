"""The algebra of layouts: against numpy arrays whose entries know where they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitgrow.layout import (
    EMPTY,
    ONE,
    PINNED,
    Axis,
    Block,
    Cat,
    Layout,
    MismatchError,
    Prod,
    block,
    cut,
    factor,
    is_one,
    is_position,
    leaves,
    owners,
    position,
    regroup,
    repeated,
    resolve,
    size_of,
    sources,
    spread,
    unify,
)

REASON = Block("here", "because")


def sizes(layout: Layout) -> str:
    """A layout in short: 6, (2 3) for a product, [2 4] for blocks."""
    layout = resolve(layout)
    if isinstance(layout, Axis):
        return str(layout.size)
    if isinstance(layout, Cat):
        return "[" + " ".join(sizes(part) for part in layout.parts) + "]"
    return "(" + " ".join(sizes(each) for each in layout.factors) + ")"


# ---- normal form -----------------------------------------------------------------------------


def test_products_and_blocks_are_flattened() -> None:
    a, b, c = Axis(2), Axis(3), Axis(4)
    assert sizes(Prod((Prod((a, b)), c))) == "(2 3 4)"
    assert sizes(Cat((Cat((a, b)), c))) == "[2 3 4]"
    assert resolve(Prod((a,))) is a
    assert resolve(Cat((a,))) is a
    assert resolve(Prod((a, ONE))) is a
    assert resolve(Cat((EMPTY, a, EMPTY))) is a


def test_only_leading_blocks_are_multiplied_out() -> None:
    a, b, c = Axis(2), Axis(3), Axis(4)
    assert sizes(Prod((Cat((a, b)), c))) == "[(2 4) (3 4)]"
    assert sizes(Prod((c, Cat((a, b))))) == "(4 [2 3])"


def test_a_bound_axis_is_refined_wherever_it_is_mentioned() -> None:
    a, b = Axis(6), Axis(5)
    whole = Prod((a, b))
    first, rest = factor(a, 2)
    assert leaves(whole) == [first, rest, b]
    assert size_of(whole) == 30
    assert size_of(whole, {first: 4, b: 1}) == 12


def test_size_of_blocks_with_other_widths() -> None:
    a, b = Axis(2), Axis(3)
    assert size_of(Cat((a, Prod((b, a)))), {a: 5}) == 5 + 15


def test_a_dimension_of_one_position_has_no_index() -> None:
    assert is_one(position(1))
    assert not is_one(position(2))
    assert not is_one(Axis(1))
    assert is_position(position(5))
    assert is_position(ONE)
    assert not is_position(Cat((position(5), Axis(2))))


# ---- unify -----------------------------------------------------------------------------------


def test_unify_axes() -> None:
    a, b = Axis(4), Axis(4)
    unify(a, b)
    assert resolve(a) is resolve(b)
    unify(a, b)  # again, without effect
    assert isinstance(resolve(a), Axis)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((2, 3), (6,), "(2 3)"),
        ((2, 12), (8, 3), "(2 4 3)"),
        ((4, 6), (2, 2, 3, 2), "(2 2 3 2)"),
    ],
)
def test_unify_products(left: tuple[int, ...], right: tuple[int, ...], expected: str) -> None:
    a, b = (Prod(tuple(Axis(n) for n in side)) for side in (left, right))
    unify(a, b)
    assert sizes(a) == sizes(b) == expected
    assert leaves(a) == leaves(b)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [((2, 3), (5,), "[2 3]"), ((2, 4), (3, 3), "[2 1 3]"), ((1, 1, 4), (6,), "[1 1 4]")],
)
def test_unify_blocks(left: tuple[int, ...], right: tuple[int, ...], expected: str) -> None:
    a, b = (Cat(tuple(Axis(n) for n in side)) for side in (left, right))
    unify(a, b)
    assert sizes(a) == sizes(b) == expected
    assert leaves(a) == leaves(b)


def test_unify_blocks_with_a_product() -> None:
    """A concatenation of channels, flattened, meets a flattened whole."""
    a, b, inner, whole, other = Axis(2), Axis(3), Axis(4), Axis(5), Axis(4)
    unify(Prod((Cat((a, b)), inner)), Prod((whole, other)))
    assert sizes(whole) == "[2 3]"
    assert leaves(whole) == [resolve(a), resolve(b)]
    assert resolve(inner) is resolve(other)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Axis(4), Axis(5)),
        (Prod((Axis(2), Axis(3))), Prod((Axis(3), Axis(2)))),
        (Prod((Axis(4), Axis(3))), Cat((Axis(5), Axis(7)))),
        (Prod((Axis(1), Axis(6))), Prod((Axis(2), Axis(3)))),
    ],
)
def test_what_does_not_line_up_does_not_unify(a: Layout, b: Layout) -> None:
    with pytest.raises(MismatchError):
        unify(a, b)


def test_an_axis_is_never_a_part_of_itself() -> None:
    a = Axis(6)
    factors = factor(a, 2)
    with pytest.raises(MismatchError):
        unify(Cat((factors[0], Axis(4))), Prod((Axis(3), factors[0])))


def test_reasons_follow_an_axis_into_what_it_becomes() -> None:
    a, b = Axis(6), Axis(6)
    block(a, REASON)
    unify(a, b)
    assert b.blocks == [REASON]
    first, rest = cut(b, 2)
    assert [axis.blocks for axis in leaves(b)] == [[REASON], [REASON]]
    block(first, Block("there", "too"))
    assert str(leaves(first)[0].blocks[1]) == "there: too"
    assert len(leaves(rest)[0].blocks) == 1


def test_a_width_of_one_is_not_lost_in_a_dimension_that_stays_one() -> None:
    a = Axis(1)
    unify(ONE, a)
    assert a.blocks == [PINNED]
    assert leaves(a) == [a]


def test_two_widths_of_one_are_one_width() -> None:
    a, b = Axis(1), Axis(1)
    unify(a, b)
    assert resolve(a) is resolve(b)
    assert not resolve(a).blocks  # type: ignore[union-attr]


# ---- cut and factor --------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "expected"), [(0, "[] 6"), (2, "2 4"), (6, "6 []")])
def test_cut_an_axis(at: int, expected: str) -> None:
    first, rest = cut(Axis(6), at)
    assert f"{sizes(first)} {sizes(rest)}" == expected


def test_cut_blocks_between_and_within() -> None:
    whole = Cat((Axis(2), Axis(3), Axis(4)))
    assert tuple(map(sizes, cut(whole, 5))) == ("[2 3]", "4")
    assert tuple(map(sizes, cut(whole, 3))) == ("[2 1]", "[2 4]")


def test_cut_a_product_between_rows_only() -> None:
    first, rest = cut(Prod((Axis(4), Axis(3))), 6)
    assert (sizes(first), sizes(rest)) == ("(2 3)", "(2 3)")
    with pytest.raises(MismatchError):
        cut(Prod((Axis(4), Axis(3))), 5)


@pytest.mark.parametrize("at", [-1, 7])
def test_cut_outside_is_an_error(at: int) -> None:
    with pytest.raises(MismatchError):
        cut(Axis(6), at)


def test_factor() -> None:
    assert tuple(map(sizes, factor(Axis(6), 2))) == ("2", "3")
    assert tuple(map(sizes, factor(Axis(6), 6))) == ("6", "()")
    assert tuple(map(sizes, factor(Prod((Axis(2), Axis(6))), 4))) == ("(2 2)", "3")
    assert tuple(map(sizes, factor(Prod((Axis(6), Axis(2))), 3))) == ("3", "(2 2)")
    assert tuple(map(sizes, factor(Prod((Axis(2), Axis(6))), 2))) == ("2", "6")


def test_factor_blocks_with_a_common_inner_index() -> None:
    a, b, inner = Axis(2), Axis(3), Axis(4)
    flat = Prod((Cat((a, b)), inner))
    outer, rest = factor(flat, 5)
    assert leaves(outer) == [a, b]
    assert resolve(rest) is inner


def test_factor_blocks_of_one_row() -> None:
    a, b = Axis(4), Axis(8)
    outer, rest = factor(Cat((a, b)), 3)
    assert sizes(outer) == "[() 2]"
    assert size_of(rest) == 4


@pytest.mark.parametrize("outer", [0, 1, 4])
def test_factor_that_does_not_divide_is_an_error(outer: int) -> None:
    with pytest.raises(MismatchError):
        factor(Axis(6), outer)
    with pytest.raises(MismatchError):
        factor(Cat((Axis(4), Axis(5))), 3)


# ---- regroup ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 3, 4), (24,), "(2 3 4)"),
        ((2, 3, 4), (2, 12), "2 (3 4)"),
        ((2, 12), (2, 3, 4), "2 3 4"),
        ((6, 4), (3, 8), "3 (2 4)"),
        ((6, 4), (2, 12), "2 (3 4)"),
        ((2, 1, 3), (2, 3), "2 (1 3)"),
        ((2, 3), (2, 1, 3), "2 () 3"),
        ((1, 6), (6, 1), "(1 6) ()"),
        ((5, 1), (5, 1, 1), "5 1 ()"),
        ((2, 3), (2, 3, 1), "2 3 ()"),
        ((), (1, 1), "() ()"),
    ],
)
def test_regroup(before: tuple[int, ...], after: tuple[int, ...], expected: str) -> None:
    dims = [Axis(n) for n in before]
    assert " ".join(map(sizes, regroup(dims, after))) == expected


def test_regroup_keeps_blocks_whole() -> None:
    batch, a, b, inner = Axis(2), Axis(3), Axis(4), Axis(5)
    flat = regroup([batch, Cat((a, b)), inner], (2, 35))
    assert sizes(flat[1]) == "[(3 5) (4 5)]"
    back = regroup(flat, (2, 7, 5))
    assert leaves(back[1]) == [a, b]
    assert resolve(back[2]) is inner


@pytest.mark.parametrize(
    ("before", "after"), [((4, 6), (3, 8)), ((4,), (5,)), ((2, 3), (6, 2)), ((0, 3), (3, 0))]
)
def test_regroup_across_boundaries_is_an_error(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    with pytest.raises(MismatchError):
        regroup([Axis(n) for n in before], after)


# ---- entries ---------------------------------------------------------------------------------


def test_owners_by_hand() -> None:
    a, b = Axis(2), Axis(3)
    assert owners(Prod((a, b)), a).tolist() == [0, 0, 0, 1, 1, 1]
    assert owners(Prod((a, b)), b).tolist() == [0, 1, 2, 0, 1, 2]
    assert owners(Cat((b, a, b)), b).tolist() == [0, 1, 2, -1, -1, 0, 1, 2]
    assert owners(Cat((a, Prod((b, a)))), a).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert owners(EMPTY, a).tolist() == []
    assert owners(ONE, a).tolist() == [-1]


def test_spread_lays_out_an_axis_that_has_grown() -> None:
    a, b = Axis(2), Axis(3)
    values = {a: np.array([7, 8, 9])}
    assert spread(Prod((b, a)), values, fill=0).tolist() == [7, 8, 9] * 3
    assert spread(Cat((b, a)), values, fill=0).tolist() == [0, 0, 0, 7, 8, 9]


def test_sources_by_hand() -> None:
    a, b = Axis(2), Axis(3)
    grown = {a: np.array([0, 1, 0])}
    assert sources(Prod((a, b)), grown).tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert sources(Prod((b, a)), grown).tolist() == [0, 1, 0, 2, 3, 2, 4, 5, 4]
    assert sources(Cat((a, b)), grown).tolist() == [0, 1, 0, 2, 3, 4]
    assert sources(Cat((a, b)), {}).tolist() == [0, 1, 2, 3, 4]
    assert sources(EMPTY, grown).tolist() == []


def test_an_axis_that_indexes_a_tensor_twice() -> None:
    a, b = Axis(2), Axis(3)
    assert repeated((a, b)) == set()
    assert repeated((a, Prod((b, a)))) == {a}
    assert repeated((Prod((a, a)),)) == {a}
    assert repeated((Cat((a, b, a)),)) == set()
    assert repeated((Cat((a, Prod((b, b)))),)) == {b}
    assert repeated((Cat((a, b)), a)) == {a}


# ---- random programs -------------------------------------------------------------------------
#
# A tensor is a numpy array beside its layouts. Programs of reshapes, permutations, slices and
# concatenations run on both. Then the axes grow, and growing must commute with the program.


@dataclass
class Tensor:
    """Layouts, and how to compute the array from the root arrays with given widths of axes."""

    dims: list[Layout]
    compute: Callable[[list[NDArray[np.int64]], dict[Axis, int]], NDArray[np.int64]]


@dataclass
class Program:
    """Root tensors, whose entries are all different numbers, and what was made of them."""

    roots: list[list[Axis]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add_root(self, shape: tuple[int, ...]) -> None:
        dims = [Axis(n) for n in shape]
        index = len(self.roots)
        self.roots.append(dims)
        self.tensors.append(Tensor(list(dims), lambda arrays, _: arrays[index]))

    def arrays(self) -> list[NDArray[np.int64]]:
        found, start = [], 0
        for dims in self.roots:
            shape = [axis.size for axis in dims]
            found.append(np.arange(start, start + prod(shape)).reshape(shape))
            start += prod(shape)
        return found

    def reshape(self, tensor: Tensor, shape: list[int]) -> None:
        dims = regroup(tensor.dims, shape)
        self.tensors.append(
            Tensor(dims, lambda arrays, widths: tensor.compute(arrays, widths).reshape(
                [size_of(d, widths) for d in dims]))
        )  # fmt: skip

    def permute(self, tensor: Tensor, order: list[int]) -> None:
        dims = [tensor.dims[d] for d in order]
        compute = tensor.compute
        self.tensors.append(Tensor(dims, lambda a, w: compute(a, w).transpose(order)))

    def slice(self, tensor: Tensor, dim: int, start: int, stop: int) -> None:
        before, rest = cut(tensor.dims[dim], start)
        kept, _ = cut(rest, stop - start)
        dims = list(tensor.dims)
        dims[dim] = kept

        def compute(arrays: list[NDArray[np.int64]], widths: dict[Axis, int]) -> NDArray[np.int64]:
            first = size_of(before, widths)
            index = [slice(None)] * len(dims)
            index[dim] = slice(first, first + size_of(kept, widths))
            return tensor.compute(arrays, widths)[tuple(index)]

        self.tensors.append(Tensor(dims, compute))

    def concatenate(self, a: Tensor, b: Tensor, dim: int) -> None:
        for d, (x, y) in enumerate(zip(a.dims, b.dims, strict=True)):
            if d != dim:
                unify(x, y)
        dims = list(a.dims)
        dims[dim] = Cat((a.dims[dim], b.dims[dim]))
        self.tensors.append(
            Tensor(dims, lambda arrays, widths: np.concatenate(
                [a.compute(arrays, widths), b.compute(arrays, widths)], dim))
        )  # fmt: skip


def _factorisations(total: int, draw: st.DrawFn) -> list[int]:
    """A random shape with ``total`` entries."""
    shape = []
    while total > 1 and len(shape) < 3:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        shape.append(draw(st.sampled_from(divisors)))
        total //= shape[-1]
    return [*shape, total]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    for _ in range(draw(st.integers(1, 3))):
        program.add_root(tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 6))):
        try:
            _step(program, draw)
        except MismatchError:
            assume(False)  # what has been unified by then may be wrong; rules block it all
    return program


def _step(program: Program, draw: st.DrawFn) -> None:
    tensor = draw(st.sampled_from(program.tensors))
    shape = [size_of(d) for d in tensor.dims]
    kind = draw(st.sampled_from(["reshape", "flatten", "permute", "slice", "cat", "cat"]))
    if kind == "reshape":
        program.reshape(tensor, _factorisations(prod(shape), draw))
    elif kind == "flatten" and len(shape) > 1:
        d = draw(st.integers(0, len(shape) - 2))
        program.reshape(tensor, [*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]])
    elif kind == "permute":
        program.permute(tensor, draw(st.permutations(range(len(shape)))))
    elif kind == "slice":
        d = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, shape[d] - 1))
        program.slice(tensor, d, start, draw(st.integers(start + 1, shape[d])))
    elif kind == "cat":
        _draw_concatenation(program, tensor, shape, draw)


def _draw_concatenation(program: Program, a: Tensor, shape: list[int], draw: st.DrawFn) -> None:
    b = draw(st.sampled_from(program.tensors))
    other = [size_of(d) for d in b.dims]
    dims = [d for d in range(len(shape)) if len(other) == len(shape)
            and all(shape[e] == other[e] for e in range(len(shape)) if e != d)]  # fmt: skip
    if dims:
        program.concatenate(a, b, draw(st.sampled_from(dims)))


def _all_leaves(program: Program) -> list[Axis]:
    return list(dict.fromkeys(leaf for dims in program.roots for a in dims for leaf in leaves(a)))


@given(program=programs(), data=st.data())
@settings(max_examples=max(100, settings().max_examples))
def test_growing_commutes_with_any_program(program: Program, data: st.DataObject) -> None:
    found = _all_leaves(program)
    tensors = [t for t in program.tensors if not repeated(t.dims)]
    assume(found)
    chosen = data.draw(st.lists(st.sampled_from(found), min_size=1, unique=True))
    grown = {
        axis: np.array([*range(axis.size), *data.draw(
            st.lists(st.integers(0, axis.size - 1), min_size=1, max_size=3))])
        for axis in chosen
    }  # fmt: skip
    widths = {axis: len(index) for axis, index in grown.items()}
    arrays = program.arrays()
    larger = [_take(array, dims, grown) for array, dims in zip(arrays, program.roots, strict=True)]
    for tensor in tensors:
        before = tensor.compute(arrays, {})
        after = tensor.compute(larger, widths)
        assert before.shape == tuple(size_of(d) for d in tensor.dims)
        np.testing.assert_array_equal(after, _take(before, tensor.dims, grown))


def _take(
    array: NDArray[np.int64], dims: list[Layout] | list[Axis], grown: dict[Axis, NDArray[np.int64]]
) -> NDArray[np.int64]:
    for d, layout in enumerate(dims):
        array = np.take(array, sources(layout, grown), axis=d)
    return array


@given(program=programs())
@settings(max_examples=max(100, settings().max_examples))
def test_owners_agree_with_the_roots(program: Program) -> None:
    """An entry belongs to the same value of an axis, seen from its tensor or from its root."""
    arrays = program.arrays()
    for leaf in _all_leaves(program):
        at_root = np.concatenate([_owner(dims, leaf).reshape(-1) for dims in program.roots])
        for tensor in program.tensors:
            if leaf not in repeated(tensor.dims):
                ids = tensor.compute(arrays, {})
                np.testing.assert_array_equal(_owner(tensor.dims, leaf), at_root[ids])


def _owner(dims: list[Layout] | list[Axis], leaf: Axis) -> NDArray[np.int64]:
    """The value of an axis at each entry of a tensor, or -1."""
    grids = np.meshgrid(*(owners(layout, leaf) for layout in dims), indexing="ij")
    return np.max(np.stack(grids), axis=0)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_blocks_that_unify_have_the_same_axes(left: list[int], data: st.DataObject) -> None:
    total = sum(left)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=3)))
    ends = [c for c in cuts if c < total] + [total]
    right = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    a, b = (Cat(tuple(Axis(n) for n in side)) for side in (left, right))
    unify(a, b)
    assert leaves(a) == leaves(b)
    boundaries = set(np.cumsum([0, *left])) | set(np.cumsum([0, *right]))
    assert [axis.size for axis in leaves(a)] == np.diff(sorted(boundaries)).tolist()


def test_a_shift_of_many_channels_ends() -> None:
    """x[:, 1:] + x[:, :-1] states that every channel is the next one."""
    whole = Axis(4000)
    with pytest.raises(MismatchError):
        unify(cut(whole, 1)[1], cut(whole, 3999)[0])


def test_blocks_that_change_places_are_one() -> None:
    a, b = Axis(3), Axis(3)
    unify(Cat((a, b)), Cat((b, a)))
    assert resolve(a) is resolve(b)
