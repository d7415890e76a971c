"""Kernels that were compiled in advance: which ones are used, and which are not."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gradserve_server.commands.cli import cli
from gradserve_server.devices.cuda.programs import NVRTC_OPTIONS, Cubins
from gradserve_server.ops import registry
from gradserve_server.ops.cudnn_rnn.cuda.family import tag_program
from gradserve_server.ops.gru import cuda as gru
from gradserve_server.ops.registry import cuda_programs
from gradserve_server.tensors.spec import FLOAT32

SOURCE, CUBIN = "a kernel", b"\x7fELF of a kernel"


def cubins(folder: Path, architecture: str = "sm_90", compiler: tuple[int, int] = (13, 4)) -> Cubins:
    return Cubins(folder, architecture, compiler)


def test_what_was_saved_is_found_by_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first = cubins(folder)
    assert first.find(SOURCE) is None
    first.save(SOURCE, CUBIN)
    for each in (first, cubins(folder)):
        path = each.find(SOURCE)
        assert path is not None
        assert Path(path).read_bytes() == CUBIN


@pytest.mark.parametrize(
    ("architecture", "compiler", "source"),
    [("sm_100", (13, 4), SOURCE), ("sm_90", (13, 3), SOURCE), ("sm_90", (13, 4), "another kernel")],
    ids=["architecture", "compiler", "source"],
)
def test_others_are_not_found(
    tmp_path: Path, architecture: str, compiler: tuple[int, int], source: str, caplog: pytest.LogCaptureFixture
) -> None:
    cubins(tmp_path).save(SOURCE, CUBIN)
    assert cubins(tmp_path, architecture, compiler).find(source) is None
    assert caplog.messages == []


@pytest.mark.parametrize("content", [b"", CUBIN[:-1], CUBIN + b"more", b"\x7fELF of another kernel"])
def test_a_damaged_one_is_not_used(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    cubins(tmp_path).save(SOURCE, CUBIN)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert cubins(tmp_path).find(SOURCE) is None
    assert caplog.messages == [f"a compiled CUDA kernel cannot be read, and is compiled again: {file} is damaged"]


def test_what_cannot_be_read_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cubins(tmp_path).save(SOURCE, CUBIN)
    (file,) = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    assert cubins(tmp_path).find(SOURCE) is None
    assert cubins(tmp_path / file.name / "missing").find(SOURCE) is None
    (message,) = caplog.messages
    assert message.startswith("a compiled CUDA kernel cannot be read, and is compiled again: [Errno 21]")


def test_a_folder_that_cannot_be_listed_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert cubins(file).find(SOURCE) is None
    (message,) = caplog.messages
    assert message.startswith("compiled CUDA kernels cannot be read, and are compiled again: [Errno 20]")


class Nvrtc(types.ModuleType):
    """What the command asks of CuPy's module."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self) -> None:
        super().__init__("cupy_backends.cuda.libs.nvrtc")
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.open = 0
        self.refused = "#refused"

    def getSupportedArchs(self) -> list[int]:  # noqa: N802
        return [80, 90]

    def getVersion(self) -> tuple[int, int]:  # noqa: N802
        return 13, 4

    def createProgram(self, source: str, name: str, headers: Any, includes: Any) -> str:  # noqa: N802
        self.open += 1
        return source

    def compileProgram(self, source: str, options: tuple[str, ...]) -> None:  # noqa: N802
        if self.refused in source:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        self.compiled.append((source, options))

    def getProgramLog(self, source: str) -> str:  # noqa: N802
        return "kernel.cu(1): error"

    def getCUBIN(self, source: str) -> bytes:  # noqa: N802
        return source.encode()

    def destroyProgram(self, source: str) -> None:  # noqa: N802
        self.open -= 1


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> Nvrtc:
    made = Nvrtc()
    libraries = types.ModuleType("cupy_backends.cuda.libs")
    libraries.nvrtc = made  # type: ignore[attr-defined]
    for name in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, libraries.__name__, libraries)
    return made


def run(folder: Path, architectures: str) -> Result:
    return CliRunner().invoke(cli, ["kernels", "compile", "--architectures", architectures, "--output", str(folder)])


def test_every_kernel_has_a_source_of_its_own() -> None:
    kernels = [(program, kernel) for program in cuda_programs() for kernel in program.kernels]
    sources = {program.source_of(kernel) for program, kernel in kernels}
    assert len(sources) == len(kernels)
    assert {source.count("__global__") for source in sources} == {1}


def test_the_command_compiles_every_kernel_once(tmp_path: Path, nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [tag_program(), gru.program(FLOAT32)]
    monkeypatch.setattr(registry, "cuda_programs", lambda: iter(some))
    sources = {program.source_of(kernel) for program in some for kernel in program.kernels}
    for _ in range(2):
        result = run(tmp_path, "sm_80, sm_90")
        assert result.exit_code == 0, result.output
        assert result.output.startswith(f"sm_80: {len(sources)} kernels in {tmp_path}, ")
        assert len(nvrtc.compiled) == 2 * len(sources)
    assert {source for source, _ in nvrtc.compiled} == sources
    assert {options for _, options in nvrtc.compiled} == {
        (*NVRTC_OPTIONS, f"--gpu-architecture={architecture}") for architecture in ("sm_80", "sm_90")
    }
    assert nvrtc.open == 0
    assert all(cubins(tmp_path, each).find(source) for each in ("sm_80", "sm_90") for source in sources)


def test_the_command_shows_how_far_it_is(tmp_path: Path, nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "cuda_programs", lambda: iter([tag_program()]))
    assert run(tmp_path, "sm_80").stderr == ""
    monkeypatch.setattr("gradserve_server.commands.wording.shows_progress", lambda **_: True)
    assert run(tmp_path, "sm_90").stderr.startswith("sm_90")


def test_the_command_names_an_unknown_architecture(tmp_path: Path, nvrtc: Nvrtc) -> None:
    result = run(tmp_path, "sm_90,h100")
    assert result.exit_code == 2
    assert "'h100' is not one of those that this NVRTC knows: sm_80, sm_90" in result.output
    assert nvrtc.compiled == []


def test_the_command_says_what_does_not_compile(tmp_path: Path, nvrtc: Nvrtc) -> None:
    nvrtc.refused = " reserve_tag("
    result = run(tmp_path, "sm_90")
    assert (result.exit_code, nvrtc.open) == (1, 0)
    assert result.output.endswith("Error: NVRTC_ERROR_COMPILATION (6)\n  kernel.cu(1): error\n")


def test_the_command_says_what_cannot_be_written(tmp_path: Path, nvrtc: Nvrtc) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    result = run(file / "folder", "sm_90")
    assert result.exit_code == 1
    assert "Error: [Errno 20] Not a directory" in result.output


def test_the_command_needs_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    result = run(tmp_path, "sm_90")
    assert result.exit_code == 1
    assert "see the extras cuda12 and cuda13" in result.output
