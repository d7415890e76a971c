"""Kernels that were compiled when the server was installed. Needs no GPU."""

import hashlib
import logging
import os
import sys
from pathlib import Path

from gradserve_server.devices.cuda.program import COMPILE_OPTIONS

INSTALLED = Path(sys.prefix, "share", "gradserve", "kernels")
"""Where they are: beside the program itself, and so written by whoever installs it."""
NVRTC_OPTIONS = (*COMPILE_OPTIONS, "-ftz=true", "--device-as-default-execution-space")
"""Ours, and those that CuPy adds."""

_DIGEST_BYTES = 16

_log = logging.getLogger(__name__)


class Cubins:
    """Compiled kernels in a folder, in files that nobody need trust: each is named by its source and by its content."""

    def __init__(self, folder: Path, architecture: str, compiler: tuple[int, int]) -> None:
        """Takes what the kernels are for.

        Args:
            folder: The folder. There need not be one.
            architecture: The kind of GPU, such as "sm_90".
            compiler: The version of NVRTC. Kernels of another one are not used, since they may round differently.
        """
        self._folder = folder
        self._meaning = repr((architecture, compiler, NVRTC_OPTIONS)).encode()
        self._architecture = architecture
        self._files: dict[str, str] = {}
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            names = []
        except OSError as error:
            _log.warning("compiled CUDA kernels cannot be read, and are compiled again: %s", error)
            names = []
        for name in names:
            source, _, rest = name.partition("-")
            if rest.endswith(".cubin"):
                self._files[source] = name

    def find(self, source: str) -> str | None:
        """Returns the path of a compiled source; None if there is none, or only one that is damaged."""
        name = self._files.get(self._source_digest(source))
        if name is None:
            return None
        path = self._folder / name
        try:
            if name == self._name(source, path.read_bytes()):
                return str(path)
            problem: object = f"{path} is damaged"
        except OSError as error:
            problem = error
        _log.warning("a compiled CUDA kernel cannot be read, and is compiled again: %s", problem)
        return None

    def save(self, source: str, cubin: bytes) -> None:
        """Saves a compiled source in the folder.

        Raises:
            OSError: It cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        name = self._name(source, cubin)
        unfinished = self._folder / f"{name}.{os.getpid()}.part"
        unfinished.write_bytes(cubin)
        unfinished.replace(self._folder / name)
        self._files[self._source_digest(source)] = name

    def _name(self, source: str, cubin: bytes) -> str:
        return f"{self._source_digest(source)}-{self._architecture}-{_digest(cubin)}.cubin"

    def _source_digest(self, source: str) -> str:
        return _digest(self._meaning + b"\0" + source.encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
