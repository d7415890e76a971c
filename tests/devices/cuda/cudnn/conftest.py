"""cuDNN's wheel for the tests that are marked `cudnn`."""

import importlib.util
from pathlib import Path

import pytest


def wheel() -> Path | None:
    """The folder of the wheel with `include` and `lib`; None where it is not installed."""
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.cudnn") is None:
        return None
    spec = importlib.util.find_spec("nvidia.cudnn")
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or ())))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cudnn")]
    if marked and wheel() is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs cuDNN's wheel: make check-cudnn"))


@pytest.fixture(scope="session")
def include() -> Path:
    """Where the headers are."""
    found = wheel()
    assert found is not None
    return found / "include"


@pytest.fixture(scope="session")
def library(include: Path) -> Path:
    """The file of the library. (`load_cudnn` would load cuBLAS first, another 500 MB, for which there is no use.)"""
    return include.parent / "lib" / "libcudnn.so.9"
