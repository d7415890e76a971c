"""How cuDNN is found, with a stand-in for what looks for it."""

import ctypes.util
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from gradserve_server.devices.cuda.cudnn import load_cudnn
from gradserve_server.errors import InternalError
from tests.devices.cuda.cudnn.fake_cudnn import VERSION, FakeCudnn


class NotFoundError(Exception):
    pass


def pathfinder(found: Any) -> types.ModuleType:
    """Stands for cuda.pathfinder; finds a path, or raises."""

    def load_nvidia_dynamic_lib(name: str) -> SimpleNamespace:
        assert name == "cudnn"
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(abs_path=found)

    module: Any = types.ModuleType("cuda.pathfinder")
    module.DynamicLibNotFoundError = NotFoundError
    module.load_nvidia_dynamic_lib = load_nvidia_dynamic_lib
    return module  # type: ignore[no-any-return]


def test_the_library_that_is_found_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder("/there/libcudnn.so.9"))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: {"/there/libcudnn.so.9": FakeCudnn()}[path])
    assert load_cudnn().version == VERSION


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (NotFoundError("no libcudnn.so.9"), "cuDNN 9 cannot be loaded: no libcudnn.so.9"),
        ("/nowhere/libcudnn.so.9", "cuDNN 9 cannot be loaded: /nowhere/libcudnn.so.9"),
        (ctypes.util.find_library("c"), "cuDNN 9 cannot be loaded: .*cudnn"),
    ],
    ids=["not found", "not there", "another library"],
)
def test_failures_say_why(monkeypatch: pytest.MonkeyPatch, found: Any, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder(found))
    with pytest.raises(InternalError, match=f"{reason}.*see the extras cuda12 and cuda13"):
        load_cudnn()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(InternalError, match="cannot be searched for.*see the extras cuda12 and cuda13"):
        load_cudnn()
