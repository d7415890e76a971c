"""A mixed load over every way at full speed: memory, descriptors and p99 must stay flat. `make soak MINUTES=10`."""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import gradserve
from gradserve.testing import ServerProcess
from gradserve.transport.settings import TransportName
from tests.endurance.picture import Series, draw

RESULTS = Path(__file__).parent / "results"
WAYS: tuple[TransportName, ...] = ("grpc", "bulk", "shared_memory")
MODEL = {"w": np.zeros(1000), "v": np.zeros(100_000, np.float32)}
GRADIENT = {"w": np.ones(1000), "v": np.ones(100_000, np.float32)}
X, SCALE = np.ones((64, 256), np.float32), np.ones(256, np.float32)
SETTLING_SECONDS = 75.0
"""The time until the memory, and the memory files, that the server keeps for later use have reached their limits."""


@dataclass(frozen=True)
class Sample:
    """What was seen at a time.

    Attributes:
        time: Seconds since the start.
        resident_mib: The server's memory.
        descriptors: The server's open files and sockets.
        p99_ms: The 99th percentile of the latencies since the last sample.
        calls: How many calls there were since the last sample.
    """

    time: float
    resident_mib: float
    descriptors: int
    p99_ms: float
    calls: int


class Load:
    """Clients on all ways that call until the end.

    Attributes:
        failures: What went wrong.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_over = threading.Event()
        self._latencies: list[float] = []
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._work, args=(way,)) for way in WAYS]

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def end(self) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()

    def taken_latencies(self) -> list[float]:
        """Returns the latencies since the last call of this, in seconds."""
        taken, self._latencies = self._latencies, []
        return taken

    def _work(self, way: TransportName) -> None:
        try:
            while not self._is_over.is_set():  # connections come and go, too
                with gradserve.connect(self._address, transport=way, timeout=60) as client:
                    self._calls_of_a_client(client, way)
        except BaseException as error:
            self.failures.append(error)

    def _calls_of_a_client(self, client: gradserve.Client, way: str) -> None:
        model = client.gradient_accumulator(MODEL, f"soak {way}")
        layer = client.batch_norm(updates_collections=None)
        step = model.info().global_step
        for _ in range(50):
            if self._is_over.is_set():
                return
            begin = time.perf_counter()
            step = model.push_pull(GRADIENT, 1, step).step
            model.apply_grad(GRADIENT, local_step=step)
            model.take_grad(1)
            model.read_average()
            step += 1
            handle = client.put(X)
            client.raw_ops.LayerNorm(x=handle, scale=SCALE, offset=SCALE)
            client.get(handle, release=True)
            layer.backward(X, layer.forward(X))
            self._latencies.append((time.perf_counter() - begin) / 8)


def run(minutes: float, every: float) -> list[Sample]:
    """Returns samples."""
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder), "--max-bytes", "512MiB") as server:
        load = Load(server.address)
        load.start()
        begin = time.monotonic()
        try:
            while (passed := time.monotonic() - begin) < minutes * 60 and not load.failures:
                time.sleep(every)
                latencies = sorted(load.taken_latencies())
                p99 = latencies[int(len(latencies) * 0.99)] if latencies else 0.0
                resident = server.resident_bytes / (1 << 20)
                samples.append(Sample(passed, resident, server.num_descriptors, 1000 * p99, 8 * len(latencies)))
        finally:
            load.end()
        if load.failures:
            raise load.failures[0]
    return samples


def judged(samples: Sequence[Sample]) -> dict[str, bool]:
    """Compares the first third with the last, once the server has settled."""
    settled = [each for each in samples if each.time >= SETTLING_SECONDS] or samples
    third = max(len(settled) // 3, 1)
    first, last = settled[:third], settled[-third:]

    def median(of: Sequence[Sample], name: str) -> float:
        return statistics.median(float(getattr(each, name)) for each in of)

    return {
        "memory is flat": median(last, "resident_mib") <= 1.05 * median(first, "resident_mib") + 16,
        "descriptors are flat": median(last, "descriptors") <= median(first, "descriptors") + 8,
        "p99 is flat": median(last, "p99_ms") <= 1.5 * median(first, "p99_ms"),
    }


def main() -> int:
    """Returns 0 if all stayed flat."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json")
    arguments = parser.parse_args()
    samples = run(arguments.minutes, arguments.every)
    reached = judged(samples)
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    result = {"machine": machine, "reached": reached, "samples": [asdict(each) for each in samples]}
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    names = {
        "resident_mib": "memory of the server, MiB",
        "descriptors": "open files and sockets of the server",
        "p99_ms": "99th percentile of a call, ms",
        "calls": "calls between samples",
    }
    series = [
        Series(title, [(each.time, float(getattr(each, name))) for each in samples]) for name, title in names.items()
    ]
    caption = f"Mixed load over gRPC, bulk sockets and shared memory: {machine}"
    arguments.output.with_suffix(".svg").write_text(draw(caption, series))
    sys.stdout.write(json.dumps(reached, indent=1) + "\n")
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
