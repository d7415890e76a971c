"""What is declared of cuDNN, beside cuDNN's own headers."""

import ctypes
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from gradserve_server.devices.cuda import cudnn

pytestmark = pytest.mark.cudnn

HEADERS = ("cudnn_version.h", "cudnn_graph.h", "cudnn_ops.h", "cudnn_adv.h")
SCALARS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "unsigned long long": ctypes.c_ulonglong,
}
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **{name: (ctypes.c_int, arguments) for name, arguments in cudnn.CHECKED_FUNCTIONS.items()},
    **cudnn.OTHER_FUNCTIONS,
}
C_NAMES = {
    cudnn.Status: "cudnnStatus_t",
    cudnn.DataType: "cudnnDataType_t",
    cudnn.MathType: "cudnnMathType_t",
    cudnn.RnnAlgo: "cudnnRNNAlgo_t",
    cudnn.RnnMode: "cudnnRNNMode_t",
    cudnn.RnnBiasMode: "cudnnRNNBiasMode_t",
    cudnn.DirectionMode: "cudnnDirectionMode_t",
    cudnn.RnnInputMode: "cudnnRNNInputMode_t",
    cudnn.RnnDataLayout: "cudnnRNNDataLayout_t",
    cudnn.ForwardMode: "cudnnForwardMode_t",
    cudnn.WgradMode: "cudnnWgradMode_t",
}


@dataclass(frozen=True)
class Headers:
    """What the headers declare.

    Attributes:
        functions: The types of result and arguments of each, as C writes them.
        enums: The numbers of each, by name.
        handles: The names of pointers to opaque structs.
        macros: Their texts.
    """

    functions: dict[str, tuple[str, list[str]]]
    enums: dict[str, dict[str, int]]
    handles: set[str]
    macros: dict[str, str]

    def ctype(self, declared: str) -> tuple[Any, ...]:
        """Returns the types of ctypes that stand for a C type: for pointers there are several."""
        text = declared.replace("const ", "").replace("[]", "*").strip()
        if text.endswith("*"):
            pointee = text[:-1].strip()
            if pointee == "void":
                return (ctypes.c_void_p,)
            if pointee == "char":
                return (ctypes.c_char_p,)
            pointers = tuple(ctypes.POINTER(each) for each in self.ctype(pointee))
            # In device memory, where ctypes has nothing to look for.
            return (ctypes.c_void_p,) if pointee == "int32_t" else pointers
        if text in self.handles or text == "cudaStream_t":
            return (ctypes.c_void_p,)
        if text in self.enums:
            return (ctypes.c_int,)
        return (SCALARS[text],)


@pytest.fixture(scope="module")
def headers(include: Path) -> Headers:
    text = "\n".join((include / name).read_text(encoding="utf-8") for name in HEADERS)
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    functions = {
        name: (_type(result), [_type(_without_name(each)) for each in arguments.split(",") if _type(each) != "void"])
        for result, name, arguments in re.findall(r"((?:const )?\w+ ?\*?) *CUDNNWINAPI\s+(\w+)\s*\(([^)]*)\)\s*;", text)
    }
    enums: dict[str, dict[str, int]] = {}
    for body, name in re.findall(r"typedef enum\s*\{(.*?)\}\s*(\w+)\s*;", text, flags=re.DOTALL):
        enums[name] = {key: int(value) for key, value in re.findall(r"(\w+)[\w ]*=\s*(\d+)U?\b", body)}
    handles = set(re.findall(r"typedef struct \w+ *\*(\w+);", text))
    return Headers(functions, enums, handles, dict(re.findall(r"#define (\w+) +(.+)", text)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(headers: Headers, name: str) -> None:
    result, arguments = headers.functions[name]
    ours_result, ours_arguments = FUNCTIONS[name]
    if result == "void":
        assert ours_result is None
    else:
        assert ours_result in headers.ctype(result)
    assert len(ours_arguments) == len(arguments)
    for position, (ours, declared) in enumerate(zip(ours_arguments, arguments, strict=True)):
        assert ours in headers.ctype(declared), f"argument {position}: {declared}"


@pytest.mark.parametrize("enum", cudnn.ENUMS, ids=lambda enum: enum.__name__)
def test_enum(headers: Headers, enum: type[IntEnum]) -> None:
    declared = headers.enums[C_NAMES[enum]]
    assert {member.name: declared[member.name] for member in enum} == {member.name: int(member) for member in enum}


def test_flag(headers: Headers) -> None:
    assert headers.macros["CUDNN_RNN_PADDED_IO_ENABLED"].strip() == "(1U << 0)"
    assert cudnn.CUDNN_RNN_PADDED_IO_ENABLED == 1 << 0


def test_library_is_that_of_the_headers(headers: Headers, library: Path) -> None:
    major, minor, patch = (int(headers.macros[f"CUDNN_{part}"]) for part in ("MAJOR", "MINOR", "PATCHLEVEL"))
    assert cudnn.Cudnn(ctypes.CDLL(str(library))).version == major * 10000 + minor * 100 + patch
    assert major == 9


def _type(text: str) -> str:
    return " ".join(text.replace("*", " * ").split())


def _without_name(argument: str) -> str:
    """Of `const int dimA[]` leaves `const int []`."""
    return re.sub(r"\b\w+\s*(\[\])?\s*$", r"\1", argument.strip()) if argument.strip() != "void" else argument
