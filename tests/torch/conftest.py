"""Tests of `gradserve.torch` need PyTorch; without it they are skipped."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make install-frameworks")


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The default process group of PyTorch, of this process alone."""
    from tests.torch.process_group import alone

    with alone(tmp_path_factory.mktemp("torch")):
        yield
