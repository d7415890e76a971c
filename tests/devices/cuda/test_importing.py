"""CuPy is imported, and looked at for GPUs, whatever the disk and the driver are like."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradserve_server.devices.cuda.importing import KernelCache, import_cupy
from gradserve_server.devices.inventory import NO_CUPY, take_inventory

CUPY = '''
"""What CuPy 14.2 does when it is imported, and what the server asks of it."""
import os
from types import SimpleNamespace

class Files:
    def __init__(self):
        self.folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
        if not os.path.isdir(self.folder):
            os.makedirs(self.folder)

class CUDARuntimeError(RuntimeError):
    pass

def get_count():
    {count}

def get_properties(index):
    return {{"name": b"a GPU", "totalGlobalMem": 1 << 30}}

def set_backend(backend):
    compiler._kernel_cache_backend = backend

compiler = SimpleNamespace(_kernel_cache_backend=Files(), _set_kernel_cache_backend=set_backend)
runtime = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError, getDeviceCount=get_count, getDeviceProperties=get_properties
)
cuda = SimpleNamespace(compiler=compiler, runtime=runtime)
compute_types = {{}}
_core = SimpleNamespace(
    set_compute_type=lambda dtype, kind: compute_types.update({{dtype.__name__: kind}}),
    _routines_linalg=SimpleNamespace(COMPUTE_TYPE_PEDANTIC="pedantic"),
)
'''
MakeCupy = Callable[[str], None]


@pytest.fixture
def make_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCupy]:
    """Makes a CuPy that counts GPUs as it is told."""

    def make(count: str) -> None:
        (tmp_path / "cupy.py").write_text(CUPY.format(count=count))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "cupy", raising=False)

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    yield make
    sys.modules.pop("cupy", None)


def test_kernels_are_cached_in_the_usual_folder(
    make_cupy: MakeCupy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_cupy("return 1")
    for _ in range(2):
        cupy = import_cupy()
    cache = cupy.cuda.compiler._kernel_cache_backend
    assert isinstance(cache, KernelCache)
    assert (tmp_path / "cache").is_dir()
    assert caplog.messages == []
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "cache")


def test_products_of_float32_are_in_float32(make_cupy: MakeCupy) -> None:
    make_cupy("return 1")
    assert import_cupy().compute_types == {"float32": "pedantic"}


@pytest.mark.parametrize("home", [None, "file"])
def test_a_folder_that_cannot_be_made(
    make_cupy: MakeCupy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    home: str | None,
) -> None:
    (tmp_path / "file").write_text("")
    make_cupy("return 1")
    if home is None:
        monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    else:
        monkeypatch.delenv("CUPY_CACHE_DIR")
        monkeypatch.setenv("HOME", str(tmp_path / home))
    before = os.environ.get("CUPY_CACHE_DIR")
    for _ in range(2):
        cache = import_cupy().cuda.compiler._kernel_cache_backend
    cache.save("kernel", b"code", "source")
    assert cache.load("kernel") is None
    assert os.environ.get("CUPY_CACHE_DIR") == before
    (message,) = caplog.messages
    assert message.startswith("compiled CUDA kernels cannot be cached: [Errno 20] Not a directory: ")
    assert message.endswith("; each start compiles them again (CUPY_CACHE_DIR names another folder)")


class FullDisk:
    """A cache whose disk fails; it notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def load(self, name: str) -> bytes | None:
        self.asked.append("load")
        if name == "unreadable":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return b"code"

    def save(self, name: str, cubin: bytes, source: str) -> None:
        self.asked.append("save")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    disk = FullDisk()
    cache = KernelCache(disk)
    assert cache.load("kernel") == b"code"
    for _ in range(2):
        cache.save("kernel", b"code", "source")
    assert disk.asked == ["load", "save"]
    assert cache.load("kernel") is None
    (message,) = caplog.messages
    assert message == (
        "compiled CUDA kernels cannot be cached: [Errno 28] No space left on device; the next start compiles them again"
    )


def test_a_cache_that_cannot_be_read_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert KernelCache(FullDisk()).load("unreadable") is None
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("count", "names", "why_no_gpu"),
    [
        ("return 2", ["cpu", "cuda:0", "cuda:1"], None),
        ("return 0", ["cpu"], "CUDA finds no GPU"),
        ("raise CUDARuntimeError('the driver is too old')", ["cpu"], "CUDA cannot be used: the driver is too old"),
    ],
)
def test_the_gpus_of_a_machine(make_cupy: MakeCupy, count: str, names: list[str], why_no_gpu: str | None) -> None:
    make_cupy(count)
    inventory = take_inventory()
    assert ([each.name for each in inventory.devices], inventory.why_no_gpu) == (names, why_no_gpu)


def test_a_cupy_whose_libraries_are_missing(make_cupy: MakeCupy, tmp_path: Path) -> None:
    make_cupy("return 1")
    (tmp_path / "cupy.py").write_text("raise ImportError('libnvrtc.so: cannot open')")
    assert take_inventory().why_no_gpu == "CuPy cannot be imported: libnvrtc.so: cannot open"


def test_a_machine_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    inventory = take_inventory()
    assert ([each.name for each in inventory.devices], inventory.why_no_gpu) == (["cpu"], NO_CUPY)
