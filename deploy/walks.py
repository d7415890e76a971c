"""Counts what a newcomer meets: the files that a call passes through, and the modules and lines of the product.

    python -m deploy.walks            prints the tables of docs/architecture_walks.md
    python -m deploy.walks --write    writes it there
    python -m deploy.walks --files push_pull    lists the files of one flow, in the order in which it enters them

A room is a folder right below a package, such as `accumulators`; modules beside these folders are in the room "root".
"""

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np

import gradserve
from gradserve_protocol.lasting import keep_doing
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_testing import LocalServer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture_walks.md"
PACKAGES = {
    ROOT / "client" / "gradserve_protocol": "client",
    ROOT / "client" / "gradserve": "client",
    ROOT / "server" / "gradserve_server": "server",
    ROOT / "server" / "gradserve_testing": "server",
    ROOT / "server" / "gradserve_ray": "server",
    ROOT / "server" / "gradserve_demo": "server",
}
GENERATED = {ROOT / "client" / package / "v1" for package in ("gradserve", "gradserve_protocol")}
GENERATED_HEADER = "# Made by "
"""The first words of other generated files."""
SUFFIXES = (".py", ".pyi", ".cu", ".cuh", ".js")
_SETTLING_SECONDS = 0.3
"""The time for background work that a call leaves."""
_NUM_EQUAL, _MOST_WALKS = 3, 30
"""A call is recorded until so many walks have the fewest calls of all, or there are the most walks."""
_NEVER_STALE = 1 << 40
_TABLE_START, _TABLE_END = "<!-- table -->", "<!-- end -->"


@dataclass
class Walk:
    """The files that one call entered, and the numbers of its calls and switches.

    Attributes:
        files: The files, in order, without repetition.
        calls: The number of calls of Python functions.
        file_switches: How often a call led into another file than the one before it, in the same thread.
        room_switches: The same for rooms.
        by_room: The number of calls in each room, by its side and its name, such as ("server", "accumulators").
    """

    files: dict[Path, None] = field(default_factory=dict)
    calls: int = 0
    file_switches: int = 0
    room_switches: int = 0
    by_room: Counter[tuple[str, str]] = field(default_factory=Counter)

    def of(self, side: str) -> int:
        """Returns the number of files on the client or the server."""
        return sum(_side(file) == side for file in self.files)


class Tracer:
    """Records the calls of this thread, and of all that start after it was entered.

    Work that goes on as long as a server, with and without calls (`gradserve_protocol.lasting`), is no part of a walk.
    """

    def __init__(self) -> None:
        self._walk: Walk | None = None
        self._last: dict[int, Path] = {}
        self._known: dict[str, Path | None] = {}

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @contextmanager
    def walking(self) -> Iterator[Walk]:
        """Records the calls of a block."""
        walk = Walk()
        self._last.clear()
        self._walk = walk
        try:
            yield walk
            time.sleep(_SETTLING_SECONDS)
        finally:
            self._walk = None

    def of(self, call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Walk:
        """Records a call in its steady state: it was made three times before, each time after `prepare`.

        Of several walks, returns one with the fewest calls: a server's background work falls into the others.
        """
        for _ in range(3):
            prepare()
            call()
            time.sleep(_SETTLING_SECONDS)
        walks: list[Walk] = []
        fewest = Walk()
        while len(walks) < _MOST_WALKS and sum(each.calls == fewest.calls for each in walks) < _NUM_EQUAL:
            prepare()
            time.sleep(_SETTLING_SECONDS)
            with self.walking() as walk:
                call()
            walks.append(walk)
            fewest = min(walks, key=attrgetter("calls"))
        return fewest

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        walk = self._walk
        if walk is None or event != "call":
            return
        name = frame.f_code.co_filename
        if name not in self._known:
            path = Path(name)
            self._known[name] = path if _side(path) else None
        file = self._known[name]
        if file is None or _is_lasting(frame):
            return
        thread = threading.get_ident()
        last = self._last.get(thread)
        self._last[thread] = file
        walk.calls += 1
        walk.by_room[_side(file), _room(file)[1]] += 1
        walk.files.setdefault(file)
        if last is not None and last != file:
            walk.file_switches += 1
            walk.room_switches += _room(last) != _room(file)


def _is_lasting(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not keep_doing.__code__:
        frame = frame.f_back
    return frame is not None


def _side(file: Path) -> str:
    return next((side for package, side in PACKAGES.items() if package in file.parents), "")


def _room(file: Path) -> tuple[str, str]:
    package = next(each for each in PACKAGES if each in file.parents)
    inside = file.relative_to(package).parts
    return package.name, inside[0] if len(inside) > 1 else "root"


def flows(tracer: Tracer) -> Iterator[tuple[str, Walk]]:
    """Runs every flow against servers in this process."""
    with ExitStack() as stack:
        server = stack.enter_context(LocalServer())
        server.wait_until_prepared()
        over_grpc = stack.enter_context(gradserve.connect(server.address, transport="grpc"))
        client = stack.enter_context(gradserve.connect(server.address))

        small = np.ones(1024, np.float32)
        accumulator = over_grpc.conditional_accumulator("float32", small.shape)
        yield "apply_grad, 4 KB, gRPC", tracer.of(lambda: accumulator.apply_grad(small))

        gradients = {f"layer{number}": np.ones(64 * 1024, np.float32) for number in range(20)}
        model = client.gradient_accumulator(gradients, "model")
        yield (
            "push_pull, 20 tensors, shared memory",
            tracer.of(lambda: model.push_pull(gradients, 1, local_step=_NEVER_STALE)),
        )

        yield "FusedBatchNormGradV3", tracer.of(_batch_norm_gradient(client))
        yield "layer forward and backward", tracer.of(_layer(client))
    yield "sharded push_pull, 2 servers", _sharded(tracer)
    yield "restart with a state directory", _restart(tracer)


def _recorded() -> list[tuple[str, Walk]]:
    with Tracer() as tracer:
        return list(flows(tracer))


def _batch_norm_gradient(client: gradserve.Client) -> Callable[[], object]:
    x = np.ones((4, 8, 8, 16), np.float32)
    ones = np.ones(16, np.float32)

    def call() -> object:
        return client.raw_ops.FusedBatchNormGradV3(
            y_backprop=x,
            x=x,
            scale=ones,
            reserve_space_1=ones,
            reserve_space_2=ones,
            reserve_space_3=ones,
            epsilon=0.001,
            is_training=True,
        )

    return call


def _layer(client: gradserve.Client) -> Callable[[], object]:
    layer = client.batch_norm()
    x = np.ones((4, 8, 8, 16), np.float32)

    def call() -> object:
        layer(x)
        return layer.backward(x)

    return call


def _sharded(tracer: Tracer) -> Walk:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                LocalServer(
                    ServerConfig(cluster=ClusterConfig(cluster="walks", cluster_index=index, cluster_size=2)),
                    address="127.0.0.1:0",
                )
            )
            for index in range(2)
        ]
        for each in servers:
            each.wait_until_prepared()
        client = stack.enter_context(gradserve.connect([each.address for each in servers]))
        gradients = {f"layer{number}": np.ones(64 * 1024, np.float32) for number in range(20)}
        model = client.gradient_accumulator(gradients, "model", sharded=True)
        return tracer.of(lambda: model.push_pull(gradients, 1, local_step=_NEVER_STALE))


def _restart(tracer: Tracer) -> Walk:
    with tempfile.TemporaryDirectory() as folder:
        config = ServerConfig(state=StateConfig(state_dir=folder))
        with LocalServer(config) as server, gradserve.connect(server.address) as client:
            client.gradient_accumulator({"w": np.ones(1024, np.float32)}, "model").push_pull(
                {"w": np.ones(1024, np.float32)}, 1
            )
            client.batch_norm(scope="layer")(np.ones((4, 16), np.float32))
        with tracer.walking() as walk, LocalServer(config) as server:
            server.wait_until_prepared()
        return walk


def sizes() -> dict[str, int]:
    """Counts modules and lines that people have written."""
    files = [
        file
        for package in PACKAGES
        if package.exists()
        for file in package.rglob("*")
        if file.suffix in SUFFIXES and GENERATED.isdisjoint(file.parents) and "__pycache__" not in file.parts
    ]
    files = [file for file in files if not file.read_text().startswith(GENERATED_HEADER)]
    modules = [file for file in files if file.suffix == ".py" and file.name != "__init__.py"]
    server = ROOT / "server" / "gradserve_server"
    lengths = sorted(len(file.read_text().splitlines()) for file in modules)
    return {
        "modules (without `__init__.py`)": len(modules),
        "median lines of a module": lengths[len(lengths) // 2],
        "lines (py, pyi, cu, js)": sum(len(file.read_text().splitlines()) for file in files),
        "modules at the server's root": len([file for file in modules if file.parent == server]),
    }


def table() -> str:
    """Returns both tables in Markdown."""
    lines = [
        "| flow | files: client | server | calls | switches of file | switches of room |",
        "|---|---|---|---|---|---|",
    ]
    for name, walk in _recorded():
        numbers = (walk.of("client"), walk.of("server"), walk.calls, walk.file_switches, walk.room_switches)
        lines.append(f"| {name} | " + " | ".join(f"{each:,}" for each in numbers) + " |")
    lines += ["", "| size | |", "|---|---|"]
    lines += [f"| {name} | {number:,} |" for name, number in sizes().items()]
    return "\n".join(lines)


def main() -> None:
    """Prints or writes the tables, or lists the files of one flow."""
    parser = argparse.ArgumentParser(description="Counts the files that calls pass through, and the product's modules.")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.relative_to(ROOT)}")
    parser.add_argument("--files", metavar="FLOW", help="list the files of the flows whose name has this")
    arguments = parser.parse_args()
    if arguments.files:
        for name, walk in _recorded():
            if arguments.files in name:
                counts = Counter(_room(file) for file in walk.files)
                sys.stdout.write(f"{name}: {len(walk.files)} files in {len(counts)} rooms\n")
                sys.stdout.writelines(f"    {file.relative_to(ROOT)}\n" for file in walk.files)
        return
    text = table()
    if arguments.write:
        page = PAGE.read_text()
        before, _, rest = page.partition(_TABLE_START)
        _, _, after = rest.partition(_TABLE_END)
        PAGE.write_text(f"{before}{_TABLE_START}\n{text}\n{_TABLE_END}{after}")
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
