"""The common parts of benchmarks on a GPU: libraries, clocks, and the provenance of results."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import provenance

_COPY_BYTES = 1 << 30
_MAX_PLUG_COPIES = 1 << 10

Call = Callable[[int], Any]
"""A function that queues one computation on the i-th inputs and returns its outputs."""


def libraries() -> tuple[Any, Any]:
    """Returns CuPy and torch; ends the program with the reason if they cannot be used."""
    try:
        import cupy
        import torch
    except ImportError as error:
        sys.exit(f"this benchmark needs an NVIDIA GPU, CuPy and torch: {error}")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        sys.exit(f"this benchmark needs an NVIDIA GPU: {error}")
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a torch built for CUDA")
    return cupy, torch


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that all these benchmarks take."""
    made = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    made.add_argument("--json", type=Path, help="the result file (default: none)")
    made.add_argument("--repeats", type=int, default=20, help="of each implementation in turn (default: 20)")
    return made


def facts(cupy: Any, torch: Any) -> dict[str, Any]:
    """Returns the facts that the results depend on."""
    runtime = cupy.cuda.runtime
    return {
        **provenance.describe(),
        "device": runtime.getDeviceProperties(0)["name"].decode(),
        "driver_cuda": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def print_facts(known: Mapping[str, Any]) -> None:
    """Prints a line for each fact."""
    for name, fact in known.items():
        print(f"{name.replace('_', ' ')}: {fact}")


def write_json(path: Path, known: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Writes a result file."""
    content = {"provenance": known, "results": results}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


@contextmanager
def torch_on_stream(torch: Any, stream: Any) -> Iterator[None]:
    """Makes torch queue its work on a CuPy stream."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield


def torch_from_host(torch: Any, array: NDArray[Any]) -> Any:
    """Returns a tensor on the GPU; passes NumPy's bfloat16, which torch does not know, as its bits."""
    bits = torch.from_numpy(array.view(np.int16 if array.itemsize == 2 else np.int32)).cuda()
    return bits.view(getattr(torch, array.dtype.name))


class Stopwatch:
    """Times the GPU's work on CuPy's current stream."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.stream = cupy.cuda.get_current_stream()
        self._source = cupy.empty(_COPY_BYTES, np.uint8)
        self._target = cupy.empty(_COPY_BYTES, np.uint8)
        self._source.data.memset_async(1, _COPY_BYTES)
        self._plug_copies = 8

    def copy_bandwidth(self) -> float:
        """Returns the bytes per second of a copy within the GPU's memory, counting reads and writes."""
        seconds = statistics.median(self.time(lambda _: self._copy(), 4)[0] for _ in range(20))
        return 2 * _COPY_BYTES / seconds

    def time(self, call: Call, count: int) -> tuple[float, float]:
        """Returns the seconds of one call on the GPU, and the seconds of queueing it."""
        while True:
            start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            for _ in range(self._plug_copies):
                self._copy()
            start.record(self.stream)
            began = time.perf_counter()
            outputs = [call(index) for index in range(count)]
            queueing = time.perf_counter() - began
            was_ahead = not start.done
            stop.record(self.stream)
            stop.synchronize()
            del outputs
            if was_ahead or self._plug_copies >= _MAX_PLUG_COPIES:
                return self._cupy.cuda.get_elapsed_time(start, stop) / 1e3 / count, queueing / count
            self._plug_copies *= 2

    def time_alone(self, call: Callable[[], Any]) -> float:
        """Returns the seconds of one call on an idle GPU, including queueing that takes longer than the work."""
        start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        self.stream.synchronize()
        start.record(self.stream)
        outputs = call()
        stop.record(self.stream)
        stop.synchronize()
        del outputs
        seconds: float = self._cupy.cuda.get_elapsed_time(start, stop) / 1e3
        return seconds

    def _copy(self) -> None:
        self._target.data.copy_from_device_async(self._source.data, _COPY_BYTES, self.stream)
