"""The files of a state directory. An input is a list of changes: file, kind, place and value, 8 bytes each."""

import os
import random
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Self

import numpy as np

import gradserve
from gradserve.testing import ServerThread
from gradserve_server.accumulators.durable.restoring import inspect
from gradserve_server.layers.batch_norm.restoring import inspect_layers
from gradserve_server.storage.directory import StateDirectory, StateError
from gradserve_server.storage.store import StateStore
from tests.fuzz.mutations import mutated_bytes
from tests.fuzz.targets.target import Found

_CHANGE = struct.Struct("<BBIH")
_BEGINNING = 1 << 17
"""The part of each file that is changed: all of the metadata; the rest of a segment is empty."""


class State:
    """Reads a damaged state directory, as `gradserve state check` does, and a server at its start."""

    def __init__(self) -> None:
        changes = [(0, 0, 0, 0), (1, 0, 100, 255), (2, 1, 8192, 1), (2, 2, 50_000, 7), (3, 0, 64, 1), (3, 3, 0, 9)]
        self.corpus = [_CHANGE.pack(*each) for each in changes]
        self._folder = Path(tempfile.mkdtemp())
        self._files: dict[str, tuple[bytes, int]] = {}

    def __enter__(self) -> Self:
        directory = self._folder / "intact"
        with (
            ServerThread(state_dir=directory, durability="gradient") as server,
            gradserve.connect(server.address) as client,
        ):
            model = client.gradient_accumulator({"w": np.zeros(3)}, "model")
            model.push_pull({"w": np.ones(3)}, 1)
            model.apply_grad({"w": np.ones(3)}, local_step=1)
            client.batch_norm(scope="layer").forward(np.ones((2, 3), np.float32))
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    self._files[str(path.relative_to(directory))] = file.read(_BEGINNING), path.stat().st_size
        shutil.rmtree(directory)
        self._read(self._write(b""))
        return self

    def __exit__(self, *_exception: object) -> None:
        shutil.rmtree(self._folder)

    def mutated(self, data: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return mutated_bytes(data, chance)[:256]
        change = _CHANGE.pack(
            chance.randrange(8),
            chance.randrange(4),
            chance.choice((0, 16, 100, chance.randrange(_BEGINNING))),
            chance.randrange(1 << 16),
        )
        return (data + change)[-64:]

    def run(self, data: bytes) -> None:
        directory = self._write(data)
        try:
            self._read(directory)
        except StateError as error:
            if str(directory) not in str(error):
                raise Found(f"the message does not name the file: {error}") from None
        except Exception as error:
            raise Found(f"{type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(directory)

    def check(self) -> None:
        """Nothing is left behind."""

    def _write(self, data: bytes) -> Path:
        directory = Path(tempfile.mkdtemp(dir=self._folder))
        files = {name: bytearray(beginning) for name, (beginning, _) in self._files.items()}
        sizes = {name: size for name, (_, size) in self._files.items()}
        names = list(files)
        for start in range(0, len(data) - _CHANGE.size + 1, _CHANGE.size):
            number, kind, place, value = _CHANGE.unpack_from(data, start)
            name = names[number % len(names)]
            content = files[name]
            if not content:
                continue
            place %= len(content)
            match kind % 4:
                case 0:
                    content[place] = value % 256
                case 1:
                    content[place : place + 64] = bytes([value % 256]) * len(content[place : place + 64])
                case 2:
                    del content[place:]
                    sizes[name] = len(content)
                case 3:
                    content[place:place] = bytes(value % 600)
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            os.truncate(path, max(sizes[name], len(content)))
        return directory

    @staticmethod
    def _read(directory: Path) -> None:
        store = StateStore(StateDirectory(directory))
        try:
            list(inspect(store))
            list(inspect_layers(store))
        finally:
            store.close()
