"""Files with saved parameters: what `save` writes, what goes on from them, and damaged ones."""

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import gradserve
from gradserve.saved import safetensors
from gradserve.saved.safetensors import FormatError
from gradserve_protocol.arrays import BFLOAT16
from gradserve_protocol.digest import digest_of
from gradserve_protocol.v1 import parameters_pb2
from tests.client.parameters.fake_server import FakeParameterServer, inline, values_in

W = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.ones(2, BFLOAT16)
VALUES = {"w": W, "layers": {"b": B}}
GOLDEN = Path(__file__).with_name("golden.safetensors")
"""Written by the package safetensors 0.8.0 for PyTorch; see `make_golden.py`."""


def state_of(optimizer: parameters_pb2.Optimizer) -> parameters_pb2.OptimizerState:
    state = parameters_pb2.OptimizerState(component_steps=[7, 3], rounds=9, optimizer=optimizer)
    for slot, name, value in (
        ("momentum_buffer", "w", W * 2),
        ("momentum_buffer", "layers/b", np.ones(2, np.float32)),
        ("master", "layers/b", np.full(2, 1.001, np.float32)),
    ):
        state.slots.add(name=slot, component=name).value.CopyFrom(inline(value))
    return state


@pytest.fixture
def parameters(server: FakeParameterServer, client: gradserve.Client) -> gradserve.Parameters:
    made = client.parameters(VALUES, shared_name="llm")
    held = server.held["llm"]
    held.versions = {9: held.versions[0]}
    held.spec.schedule.cosine.rounds = 1 << 40
    held.state = state_of(held.spec.optimizer)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "llm.safetensors"


def test_a_file_has_parameters_and_the_state_of_the_optimizer(parameters: gradserve.Parameters, path: Path) -> None:
    assert parameters.save(path) == 9
    contents = safetensors.read(path)
    assert {name: (each.dtype.name, each.tolist()) for name, each in contents.arrays.items()} == {
        "param/w": ("float32", W.tolist()),
        "param/layers/b": ("bfloat16", [1.0, 1.0]),
        "optimizer/momentum_buffer/w": ("float32", (W * 2).tolist()),
        "optimizer/momentum_buffer/layers/b": ("float32", [1.0, 1.0]),
        "optimizer/master/layers/b": ("float32", [np.float32(1.001)] * 2),
    }
    about = json.loads(contents.metadata["gradserve"])
    assert about["format"] == 1
    assert about["step"] == 9
    assert about["optimizer"] == {"sgd": {"lr": 1.0}}
    assert about["component_steps"] == {"w": 7, "layers/b": 3}
    assert about["digest"] == parameters.read().digest


def test_without_the_optimizer_there_are_only_parameters(parameters: gradserve.Parameters, path: Path) -> None:
    parameters.save(os.fspath(path), optimizer=False)
    assert set(safetensors.read(path).arrays) == {"param/w", "param/layers/b"}
    assert gradserve.load_parameters(path).state is None


def test_what_is_loaded_is_what_was_saved(
    server: FakeParameterServer, parameters: gradserve.Parameters, path: Path
) -> None:
    parameters.save(path)
    info = parameters.load(path)
    (request,) = server.of("ChangeParameters")
    assert (request.step, info.step) == (9, 10)
    assert {name: each.tolist() for name, each in values_in(request.values).items()} == {
        "w": W.tolist(),
        "layers/b": [1.0, 1.0],
    }
    assert request.state == state_of(server.held["llm"].spec.optimizer)
    parameters.load(path, optimizer=False)
    assert not server.of("ChangeParameters")[-1].HasField("state")


def test_progress_is_told_of_all_that_travels(
    client: gradserve.Client, parameters: gradserve.Parameters, path: Path
) -> None:
    told: list[tuple[int, int]] = []

    def tell(moved: int, total: int) -> None:
        told.append((moved, total))

    num_bytes = W.nbytes + B.nbytes
    with_state = num_bytes + W.nbytes + 2 * 4 * B.size
    parameters.save(path, progress=tell)
    assert told[-1] == (with_state, with_state)
    parameters.load(path, progress=tell, optimizer=False)
    assert told[-1] == (num_bytes, num_bytes)
    client.parameters(gradserve.load_parameters(path), shared_name="other", progress=tell)
    assert told[-1] == (with_state, with_state)


def test_a_saved_run_goes_on_elsewhere(
    server: FakeParameterServer, client: gradserve.Client, parameters: gradserve.Parameters, path: Path
) -> None:
    parameters.save(path)
    saved = gradserve.load_parameters(path)
    assert (saved.step, list(saved), saved.digest) == (9, ["w", "layers/b"], parameters.read().digest)
    version = client.parameters(saved, shared_name="other").read()
    assert (version.step, version.digest) == (9, saved.digest)
    request = server.of("CreateParameters")[-1]
    assert request.state == state_of(server.held["llm"].spec.optimizer)
    assert request.spec.optimizer == server.held["llm"].spec.optimizer
    assert request.spec.schedule == server.held["llm"].spec.schedule


def test_a_saved_run_needs_the_optimizer_of_its_state(
    server: FakeParameterServer, client: gradserve.Client, parameters: gradserve.Parameters, path: Path
) -> None:
    parameters.save(path)
    with pytest.raises(
        gradserve.InvalidArgumentError, match="expected optimizer sgd, whose state is in the file"
    ) as raised:
        client.parameters(gradserve.load_parameters(path), shared_name="other", optimizer=gradserve.optim.Adam())
    assert raised.value.field == "optimizer"
    server.held["llm"].spec.optimizer.adam.lr = 0.1
    with pytest.raises(gradserve.InvalidArgumentError, match="state of optimizer adam, got that of sgd") as raised:
        parameters.load(path)
    assert raised.value.field == "path"
    assert not server.of("ChangeParameters")
    parameters.load(path, optimizer=False)


def test_a_saved_run_does_not_change_the_sign_of_its_updates(
    client: gradserve.Client, parameters: gradserve.Parameters, path: Path
) -> None:
    parameters.save(path)
    saved = gradserve.load_parameters(path)
    assert saved.update == "delta"
    with pytest.raises(gradserve.InvalidArgumentError, match="expected update='delta', with which .* saved") as raised:
        client.parameters(saved, shared_name="other", update="gradient")
    assert raised.value.field == "update"
    other = client.parameters(VALUES, shared_name="third", update="gradient", optimizer=gradserve.optim.SGD(0.1))
    with pytest.raises(gradserve.InvalidArgumentError, match="expected update='delta'"):
        other.load(path)


def test_a_model_of_another_program(server: FakeParameterServer, client: gradserve.Client) -> None:
    saved = gradserve.load_parameters(GOLDEN)
    assert {name: (each.dtype.name, each.tolist()) for name, each in saved.items()} == {
        "b": ("bfloat16", [1.0, -2.5]),
        "scale": ("float64", 0.5),
        "w": ("float32", W.tolist()),
        "empty": ("float16", []),
    }
    assert (saved.step, saved.state) == (0, None)
    parameters = client.parameters(saved, shared_name="model")
    assert not server.of("CreateParameters")[-1].HasField("state")
    parameters.load(GOLDEN)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"w": W}, r"expected components 'w', 'layers/b', got no 'layers/b' in the file"),
        ({"w": W.T, "layers/b": B, "v": W}, r"expected components 'w', 'layers/b', got also 'v' in the file"),
        ({"v": W}, r"got no 'w', 'layers/b' and also 'v' in the file"),
        ({"w": W.T.astype(np.float64), "layers/b": B}, r"expected shape \(2, 3\) of component 'w', got \(3, 2\)"),
        ({"w": W.astype(np.float64), "layers/b": B}, "expected float32 for component 'w', got float64"),
    ],
)
def test_a_file_of_another_model(
    server: FakeParameterServer, parameters: gradserve.Parameters, path: Path, values: dict[str, Any], match: str
) -> None:
    """Names are named first, then shapes, then dtypes."""
    safetensors.write(path, {name: np.ascontiguousarray(each) for name, each in values.items()}, {})
    with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
        parameters.load(path)
    assert raised.value.field == "path"
    assert not server.of("ChangeParameters")


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def about(**changes: Any) -> bytes:
    """Returns a file of one parameter whose description has changes."""
    one = np.ones(1, np.float32)
    text = {"format": 1, "components": ["w"], "step": 3, "digest": digest_of([one]).hex(), **changes}
    metadata = {"gradserve": json.dumps(text)}
    return header(__metadata__=metadata, **{"param/w": entry()}) + one.tobytes()


STATE = {
    "optimizer": {"sgd": {}},
    "component_steps": {"w": 1},
    "rounds": 1,
    "slots": [],
    "state_digest": digest_of([]).hex(),
}

DAMAGED = {
    "empty": (b"", "it has 0 bytes"),
    "short": (b"1234567", "it has 7 bytes"),
    "text": (b"This is a text, not a model.", "not a safetensors file"),
    "a zip": (b"PK\x03\x04" + bytes(100), "not a safetensors file"),
    "no JSON": (struct.pack("<Q", 4) + b"{{{{", "its header is not JSON"),
    "no text": (struct.pack("<Q", 2) + b"\xff\xfe", "its header is not JSON"),
    "deep": (struct.pack("<Q", 200_000) + b"[" * 200_000, "its header is not JSON"),
    "a list": (struct.pack("<Q", 2) + b"[]", "not an object"),
    "twice": (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "a name occurs twice"),
    "metadata": (header(__metadata__={"a": 1}), "metadata"),
    "no entry": (header(w=3), "does not describe 'w'"),
    "no offsets": (header(w={"dtype": "F32", "shape": [1]}), "does not describe 'w'"),
    "one offset": (header(w=entry(offsets=(0,))), "does not describe 'w'"),
    "dtype": (header(w=entry("F8_E4M3")) + bytes(4), "expected a dtype out of F64"),
    "negative": (header(w=entry(shape=(-1,))) + bytes(4), "sizes of at least 0"),
    "float": (header(w=entry(shape=(1.0,))) + bytes(4), "sizes of at least 0"),
    "bool": (header(w=entry(shape=(True,))) + bytes(4), "sizes of at least 0"),
    "size": (header(w=entry(shape=(2,))) + bytes(4), "'w' has 4 bytes"),
    "huge": (header(w=entry(shape=(1 << 40, 1 << 40))) + bytes(4), "'w' has 4 bytes"),
    "gap": (header(w=entry(offsets=(4, 8))) + bytes(8), "do not begin where"),
    "overlap": (header(v=entry(), w=entry()) + bytes(4), "do not begin where"),
    "ends early": (header(w=entry()) + bytes(3), "expected .* bytes, got"),
    "goes on": (header(w=entry()) + bytes(5), "expected .* bytes, got"),
    "no description": (header(__metadata__={"gradserve": "x"}, w=entry()) + bytes(4), "incomplete: JSONDecodeError"),
    "a newer format": (about(format=2), "format 2, and this version of gradserve reads up to 1"),
    "no format": (about(format="new"), "format 'new'"),
    "no component": (about(components=["v"]), "incomplete: KeyError: 'param/v'"),
    "no list": (about(components=3), "incomplete: TypeError"),
    "step": (about(step=-1), "a number of rounds, got -1"),
    "digest": (about(digest="00"), "their digest differs"),
    "optimizer": (about(**STATE | {"optimizer": {"magic": {}}}), "an optimizer or a schedule that is not known"),
    "schedule": (about(schedule={"warmup": "x"}), "an optimizer or a schedule that is not known"),
    "slots": (about(**STATE | {"slots": [["momentum_buffer", "w"]]}), "incomplete: KeyError"),
    "state": (about(**STATE | {"state_digest": "00"}), "state of the optimizer is not the one that was saved"),
    "counts": (about(**STATE | {"component_steps": {"w": 1.5}}), "a number of rounds, got 1.5"),
    "no counts": (about(**STATE | {"component_steps": {}}), "incomplete: KeyError: 'w'"),
}


@pytest.mark.parametrize(("content", "match"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files(
    server: FakeParameterServer, parameters: gradserve.Parameters, path: Path, content: bytes, match: str
) -> None:
    path.write_bytes(content)
    num_requests = len(server.requests)
    calls: list[Callable[[], object]] = [lambda: gradserve.load_parameters(path), lambda: parameters.load(path)]
    for call in calls:
        with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
            call()
        assert str(path) in str(raised.value)
        assert raised.value.field == "path"
    assert len(server.requests) == num_requests


def test_good_descriptions(path: Path) -> None:
    """The descriptions that the table of damaged files spoils are good ones."""
    for changes in ({}, STATE):
        path.write_bytes(about(**changes))
        assert gradserve.load_parameters(path).step == 3


@pytest.mark.parametrize("place", [None, 3, "", b"x", "a\0b", "\ud800"])
def test_bad_paths(parameters: gradserve.Parameters, place: Any) -> None:
    for call in (parameters.save, parameters.load, gradserve.load_parameters):
        with pytest.raises(gradserve.InvalidArgumentError) as raised:
            call(place)
        assert raised.value.field == "path"


def test_errors_of_the_disk_are_those_of_python(parameters: gradserve.Parameters, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        parameters.save(tmp_path / "nowhere" / "x")
    with pytest.raises(FileNotFoundError):
        parameters.load(tmp_path / "x")
    with pytest.raises(IsADirectoryError):
        gradserve.load_parameters(tmp_path)


def test_a_device_stays_one(parameters: gradserve.Parameters, tmp_path: Path) -> None:
    """As root, a file could take the place of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="not a regular file"):
        parameters.save(pipe)
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        parameters.save(tmp_path)
    assert os.listdir(tmp_path) == [pipe.name]


def test_a_file_is_replaced_as_a_whole(
    parameters: gradserve.Parameters, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("earlier")
    path.chmod(0o600)

    def failing(_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(safetensors, "buffer_of", failing)
        with pytest.raises(OSError, match="no space left"):
            parameters.save(path)
    assert (path.read_text(), os.listdir(path.parent)) == ("earlier", [path.name])
    link = path.with_name("link")
    link.symlink_to(path)
    parameters.save(link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert gradserve.load_parameters(path).step == 9


DTYPES = st.sampled_from([np.dtype(each) for each in ("<f2", "<f4", "<f8", "<i8", "u1", "?")] + [BFLOAT16])


@given(
    arrays=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5).filter(lambda name: name != "__metadata__"),
        arrays_of.arrays(np.uint8, arrays_of.array_shapes(min_dims=0, min_side=0)).flatmap(
            lambda each: DTYPES.map(lambda dtype: (each % 2).astype(dtype))
        ),
        max_size=4,
    ),
    metadata=st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")), max_size=3),
)
def test_whatever_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, Any], metadata: dict[str, str]
) -> None:
    place = tmp_path_factory.getbasetemp() / "any.safetensors"
    safetensors.write(place, arrays, metadata)
    read = safetensors.read(place)
    assert read.metadata == metadata
    assert {name: (each.dtype, each.shape, each.tobytes()) for name, each in read.arrays.items()} == {
        name: (each.dtype, each.shape, each.tobytes()) for name, each in arrays.items()
    }
    (length,) = struct.unpack("<Q", place.read_bytes()[:8])
    assert length % 8 == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    place = tmp_path_factory.getbasetemp() / "any.bytes"
    place.write_bytes(content)
    with suppress(FormatError):
        safetensors.read(place)
