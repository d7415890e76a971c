"""Errors about parameters name the argument that was wrong, and the component, as the program knows them."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import optim, reductions
from gradserve.testing import InProcessServer
from gradserve_protocol.errors import AlreadyExistsError, GradserveError, InvalidArgumentError, NotFoundError
from tests.servers.polling import PATIENCE_SECONDS

W = np.arange(6, dtype=np.float32).reshape(2, 3)
VALUES = {"layers": {"a.b": np.zeros(2, np.float32), "w": W}}
A, B = "layers/a.b", "layers/w"
STEP = 3
UNKNOWN = gradserve.TensorHandle("unknown", np.dtype(np.float32), (2, 3))


@pytest.fixture(scope="module")
def client() -> Iterator[gradserve.Client]:
    with InProcessServer() as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


@pytest.fixture(scope="module")
def parameters(client: gradserve.Client) -> gradserve.Parameters:
    """Returns parameters at step 3, of which two versions are kept; others have the name "taken"."""
    made = client.parameters(VALUES, shared_name="llm")
    client.parameters({"other": W}, shared_name="taken")
    for step in range(STEP):
        made.push({B: W}, step)
    return made


Push = tuple[Any, dict[str, Any], str, str]
PUSHES: list[Push] = [
    ({"x": W}, {}, "update", "expected components ['layers/a.b', 'layers/w'] for the update, got 'x'"),
    ({}, {}, "update", "at least one component"),
    ({B: W[:1]}, {}, f"update['{B}']", "expected [2,3], got [1,3]"),
    ({A: None, B: W.ravel()}, {}, f"update['{B}']", "expected [2,3], got [6]"),
    ({A: np.zeros(3), B: W}, {}, f"update['{A}']", "expected [2], got [3]"),
    ({B: W.astype(complex)}, {}, "update", f"real numbers for component '{B}'"),
    ({B: "text"}, {}, "update", f"an array or numbers for component '{B}'"),
    ({B: np.full((2, 3), np.nan)}, {}, f"update['{B}']", "got nan at [0,0]"),
    ({A: [0, 0], B: np.full((2, 3), -np.inf)}, {}, f"update['{B}']", "got -inf at [0,0]"),
    ({A: [0, 1e39]}, {}, "update", f"component '{A}', got 1e+39 at [1]"),
    ({B: W}, {"local_step": STEP + 1}, "local_step", f"at most {STEP}"),
    ({B: W}, {"local_step": 1.5}, "local_step", "an integer"),
    ({B: W}, {"weight": 0}, "weight", "a positive number"),
    ({B: W}, {"weight": math.inf}, "weight", "a positive number"),
    ({B: W}, {"weight": math.nan}, "weight", "a positive number"),
    ({B: W}, {"weight": 1e39}, "weight", "fits into a float32"),
    ({B: W}, {"weight": 1e30}, "weight", "2^-64 to 2^64"),
    ({B: W}, {"worker_id": 300 * "w"}, "worker_id", "at most 256 bytes"),
]


def raised_by(call: Callable[[], object], kind: type[GradserveError]) -> tuple[str | None, str]:
    with pytest.raises(kind) as raised:
        call()
    return raised.value.field, str(raised.value)


@pytest.mark.parametrize("method", ["push", "push_pull"])
@pytest.mark.parametrize(("update", "options", "field", "message"), PUSHES)
def test_updates(
    parameters: gradserve.Parameters, method: str, update: Any, options: dict[str, Any], field: str, message: str
) -> None:
    call = getattr(parameters, method)
    found, text = raised_by(lambda: call(update, **{"local_step": STEP, **options}), InvalidArgumentError)
    assert (found, message in text) == (field, True), text
    assert (parameters.info().step, parameters.info().num_updates) == (STEP, 0)


def test_a_tensor_that_does_not_exist(client: gradserve.Client, parameters: gradserve.Parameters) -> None:
    found, _ = raised_by(lambda: parameters.push({A: [0, 0], B: UNKNOWN}, STEP), NotFoundError)
    assert found == f"update['{B}']"
    found, _ = raised_by(lambda: client.parameters({"a": W, "b": UNKNOWN}, shared_name="new"), NotFoundError)
    assert found == "values['b']"


CREATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"shared_name": ""}, "shared_name", "an empty one"),
    ({"shared_name": 2000 * "n"}, "shared_name", "at most 1024 bytes"),
    ({"container": 2000 * "n"}, "container", "at most 1024 bytes"),
    ({"values": {"a": W, 2000 * "n": W}}, f"values['{2000 * 'n'}']", "at most 1024 bytes"),
    ({"values": {"a": np.zeros(2, np.int32)}}, "values", "got int32"),
    ({"optimizer": "sgd"}, "optimizer", "an optimizer of gradserve.optim"),
    ({"optimizer": optim.SGD(math.nan)}, "optimizer", "a finite number for lr"),
    ({"optimizer": optim.Adam(betas=(1.5, 0.9))}, "optimizer", "beta1"),
    ({"optimizer": optim.SGD(1.0, nesterov=True)}, "optimizer", "a momentum with nesterov"),
    ({"schedule": optim.cosine(-5)}, "schedule", "rounds"),
    ({"reduction": reductions.krum(3)}, "reduction", "9 updates"),
    ({"reduction": "median", "normalize": "count"}, "normalize", "weights"),
    ({"clip_norm": 1.0, "refuse_non_finite": False}, "clip_norm", "an infinite norm"),
    ({"deadline": 1e-9}, "deadline", "at least 0.001 s"),
    ({"staleness": "exponential(1e-300)", "max_staleness": 1000}, "max_staleness", "2^-64"),
    ({"durability": "round"}, "durability", "no state directory"),
    ({"idle_lease": 1e-12}, "idle_lease", "a positive idle_lease"),
    ({"agreement": {"a": 2000 * "n"}}, "agreement", "at most 1024 bytes"),
]


@pytest.mark.parametrize(("options", "field", "message"), CREATIONS)
def test_creation(client: gradserve.Client, options: dict[str, Any], field: str, message: str) -> None:
    arguments: dict[str, Any] = {"values": VALUES, "shared_name": "new", **options}
    found, text = raised_by(lambda: client.parameters(**arguments), InvalidArgumentError)
    assert (found, message in text) == (field, True), text


def test_a_name_that_is_taken(client: gradserve.Client, parameters: gradserve.Parameters) -> None:
    for call in (
        lambda: client.parameters(VALUES, shared_name="llm", keep_versions=3),
        lambda: client.parameters({"w": W}, shared_name="llm"),
        lambda: parameters.fork(shared_name="taken"),
    ):
        assert raised_by(call, AlreadyExistsError)[0] == "shared_name"


def test_forks(parameters: gradserve.Parameters) -> None:
    def field(**arguments: Any) -> str | None:
        with pytest.raises(GradserveError) as raised:
            parameters.fork(**arguments)
        return raised.value.field

    assert field(step=0, shared_name="fork") == "step", "it is no longer kept"
    assert field(step=STEP + 1, shared_name="fork") == "step"
    assert field(shared_name="") == "shared_name"
    assert field(shared_name="fork", container=2000 * "n") == "container"
    assert field(shared_name="fork", idle_lease=1e-12) == "idle_lease"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"optimizer": "sgd"}, "optimizer"),
        ({"optimizer": optim.SGD(-1.0)}, "optimizer"),
        ({"schedule": optim.cosine(0)}, "schedule"),
        ({"num_required": 0}, "num_required"),
        ({"min_required": 5}, "min_required"),
        ({"expected": 0}, "expected"),
        ({"deadline": 1e-9}, "deadline"),
    ],
)
def test_changes(parameters: gradserve.Parameters, changes: dict[str, Any], field: str) -> None:
    assert raised_by(lambda: parameters.change(**changes), InvalidArgumentError)[0] == field


def test_a_file_that_does_not_fit(client: gradserve.Client, parameters: gradserve.Parameters, tmp_path: Path) -> None:
    client.parameters({"other": W}, shared_name="taken").save(tmp_path / "other")
    assert raised_by(lambda: parameters.load(tmp_path / "other"), InvalidArgumentError)[0] == "path"
