"""Tests of `gradserve.torch` need PyTorch; without it they are skipped."""

from collections.abc import Iterator

import pytest

import gradserve

pytest.importorskip("torch", reason="PyTorch is not installed: make install-frameworks")


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The default process group of PyTorch, of this process alone."""
    from tests.torch.process_group import alone

    with alone(tmp_path_factory.mktemp("torch")):
        yield


@pytest.fixture
def clients(server_address: str) -> Iterator[list[gradserve.Client]]:
    """Two clients of the same server."""
    with gradserve.connect(server_address) as one, gradserve.connect(server_address) as other:
        yield [one, other]
