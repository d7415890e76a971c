"""Addresses that name a cluster on Ray, without Ray. `tests/ray` has clusters."""

import sys

import pytest

import gradserve
from gradserve import aio


@pytest.mark.parametrize(
    "given", ["gradserve+ray://", "gradserve+ray://a/b", "Gradserve+Ray://a b", "gradserve+ray://a,b"]
)
def test_a_wrong_name_is_refused(given: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=r"expected gradserve\+ray://NAME") as caught:
        gradserve.connect(given)
    assert caught.value.field == "address"


def test_a_missing_ray_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for connect in (gradserve.connect, aio.connect):
        with pytest.raises(gradserve.InvalidArgumentError, match=r"pip install '\.\[ray\]'"):
            connect("gradserve+ray://train")
