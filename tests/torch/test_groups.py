"""The groups of parameters that are averaged together."""

import pytest
import torch

from gradserve.torch.backward_pass import groups_of

MIB = 1 << 20


def parameters(*sizes: float, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"p{index}", torch.empty(int(size * MIB) // dtype.itemsize, dtype=dtype)) for index, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 1, 1), [["p2", "p1", "p0"]]),
        ((1, 5, 1), [["p2", "p1"], ["p0"]]),
        ((9, 1, 1, 1, 1), [["p4", "p3", "p2", "p1"], ["p0"]]),
        ((4, 0), [["p1", "p0"]]),
        ((0,), [["p0"]]),
    ],
)
def test_they_go_from_the_last_parameter_to_the_first(sizes: tuple[float, ...], expected: list[list[str]]) -> None:
    groups = groups_of(parameters(*sizes))
    assert [list(group.names) for group in groups] == expected
    assert [group.number for group in groups] == list(range(len(groups)))


def test_there_are_few_of_them_however_large_the_model() -> None:
    large = [(f"p{index}", torch.empty(MIB, device="meta")) for index in range(1000)]  # 4 MiB each
    assert len(groups_of(large)) == 16


def test_each_dtype_has_its_own() -> None:
    mixed = [*parameters(1), *((f"b{name}", each) for name, each in parameters(1, dtype=torch.bfloat16))]
    assert [(group.dtype, group.names) for group in groups_of(mixed)] == [
        (torch.bfloat16, ("bp0",)),
        (torch.float32, ("p0",)),
    ]
