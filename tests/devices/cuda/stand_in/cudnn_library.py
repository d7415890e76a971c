"""A libcudnn.so.9 whose functions are those of `QueuedCudnn`."""

import ctypes
import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

from gradserve_server.devices.cuda.cudnn import CHECKED_FUNCTIONS, OTHER_FUNCTIONS
from tests.devices.cuda.stand_in.gpu.machine import Machine
from tests.devices.cuda.stand_in.queued_cudnn import QueuedCudnn

_C_TYPES = {
    ctypes.c_int: "int",
    ctypes.c_uint32: "unsigned int",
    ctypes.c_size_t: "unsigned long",
    ctypes.c_ulonglong: "unsigned long long",
    ctypes.c_float: "float",
    None: "void",
}
_OTHERS = {name: (result, tuple(arguments)) for name, (result, arguments) in OTHER_FUNCTIONS.items()}
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **{name: (ctypes.c_int, arguments) for name, arguments in CHECKED_FUNCTIONS.items()},
    **_OTHERS,
}


def make_library(machine: Machine) -> str:
    """Returns the path of a library, which is loaded; what is called in it works on some GPUs."""
    folder = Path(machine.settings.folder)
    path = folder / "libcudnn_stand_in.so"
    with (folder / "libcudnn.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            source = folder / "libcudnn.c"
            source.write_text(_source(), encoding="utf-8")
            unfinished = folder / "libcudnn.part"
            command = [sys.executable, "-m", "ziglang", "cc", "-O1", "-shared", "-fPIC", "-o", str(unfinished)]
            subprocess.run([*command, str(source)], check=True)
            unfinished.rename(path)
    library = ctypes.CDLL(str(path))
    cudnn = QueuedCudnn(machine)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(cudnn))  # for good: objects may be destroyed at any time
    for place, name in enumerate(_FUNCTIONS):
        target = ctypes.cast(getattr(cudnn, name), ctypes.c_void_p)
        library.set_target(ctypes.c_int(place), target)
    return str(path)


def _source() -> str:
    lines = ["static void* targets[64];", "void set_target(int place, void* target) { targets[place] = target; }"]
    for place, (name, (result, arguments)) in enumerate(_FUNCTIONS.items()):
        types = [_c_type(each) for each in arguments]
        declared = ", ".join(f"{each} a{number}" for number, each in enumerate(types)) or "void"
        given = ", ".join(f"a{number}" for number in range(len(types)))
        back = "" if result is None else "return "
        kind = f"{_c_type(result)} (*)({', '.join(types) or 'void'})"
        lines.append(f"{_c_type(result)} {name}({declared}) {{ {back}(({kind})targets[{place}])({given}); }}")
    return "\n".join([*lines, ""])


def _c_type(kind: Any) -> str:
    return _C_TYPES.get(kind, "void*")
