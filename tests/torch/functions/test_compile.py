"""Calls in functions that torch.compile has compiled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gradserve
import gradserve.torch
from gradserve import face
from gradserve.client import name_of
from gradserve.torch import functions
from tests.torch.functions.test_derivatives import gru_inputs
from tests.torch.functions.test_functions import random, rnn_inputs

pytestmark = pytest.mark.usefixtures("_prepared_ops", "_forgotten_graphs")

INPUTS: dict[str, Callable[[gradserve.Client], list[Any]]] = {
    "layer_norm": lambda _: [random(3, 4), random(4), random(4)],
    "fused_batch_norm": lambda _: [random(2, 2, 3, 3), random(2), random(2)],
    "gru_block_cell": lambda _: gru_inputs(),
    "cudnn_rnn": lambda client: rnn_inputs(client, {}),
}


@pytest.fixture
def _forgotten_graphs() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("op", list(INPUTS))
def test_functions_compile_without_a_break(client: gradserve.Client, op: str) -> None:
    def run(*inputs: torch.Tensor) -> torch.Tensor:
        result = getattr(functions, op)(client, inputs[0] * 2, *inputs[1:])
        y: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
        return y.sin().sum()

    inputs = INPUTS[op](client)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    got, expected = compiled(*inputs), run(*inputs)
    torch.testing.assert_close(got, expected)
    for mine, theirs in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_another_client_in_the_same_code(client: gradserve.Client) -> None:
    run = torch.compile(lambda client, *inputs: functions.layer_norm(client, *inputs), backend="eager", fullgraph=True)
    inputs = INPUTS["layer_norm"](client)
    y = run(client, *inputs)
    with gradserve.connect(client.address) as other:
        assert torch.equal(run(other, *inputs), y)
    with pytest.raises(gradserve.CallCancelledError):
        run(other, *inputs)


@pytest.mark.parametrize("op", ["layer_norm", "fused_batch_norm", "gru_block_cell"])
def test_operators_are_declared_rightly(client: gradserve.Client, op: str) -> None:
    inputs = [each.detach() for each in INPUTS[op](client)]
    attributes: dict[str, list[Any]] = {
        "layer_norm": [1e-5],
        "fused_batch_norm": [None, None, 1e-4, 1.0, "NCHW", True],
    }
    torch.library.opcheck(
        getattr(torch.ops.gradserve, op).default,
        (name_of(client), *inputs, *attributes.get(op, ())),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


CALLS: dict[str, Callable[[gradserve.Client, Any, torch.Tensor], object]] = {
    "put": lambda client, _, x: client.put(x),
    "apply_grad": lambda _, model, x: model.apply_grad({"w": x}),
    "push_pull": lambda _, model, x: model.push_pull({"w": x}, num_required=1)["w"],
    "a raw op": lambda client, _, x: client.raw_ops.LayerNorm(
        x=x, scale=np.ones(3, np.float32), offset=np.zeros(3, np.float32)
    ),
    "an accumulator": lambda client, _, x: client.gradient_accumulator({"w": x}),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_other_calls_break_the_graph(client: gradserve.Client, call: str) -> None:
    model = client.gradient_accumulator({"w": gradserve.DenseSpec("float32", (2, 3))})
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(x: torch.Tensor) -> torch.Tensor:
        CALLS[call](client, model, x * 2)
        return x + 1

    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(run, backend=backend)(x), x + 1)
    assert graphs, "the code around the call is compiled"
    assert all("gradserve" not in str(graph.graph) for graph in graphs)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own modules
def test_a_compiled_step(client: gradserve.Client) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    weight = model.weight.detach().clone()
    with gradserve.torch.average_gradients(client, model, optimizer, num_required=1, name="compiled") as averaging:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            step()
        assert averaging.step == 2
    torch.testing.assert_close(model.weight.detach(), weight - 2)


def test_compiled_parts_have_the_names_of_others(client: gradserve.Client) -> None:
    def made(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
        return torch.nn.Sequential(wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))))

    plain = made(lambda part: part)
    compiled = made(lambda part: torch.compile(part, backend="eager"))
    gradserve.torch.broadcast_parameters(client, plain, name="parts")
    gradserve.torch.broadcast_parameters(client, compiled, name="parts")
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_other_threads_while_one_compiles(client: gradserve.Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says of all threads that they are compiling."""
    monkeypatch.setattr(face._Compiler, "is_tracing", staticmethod(lambda: True))
    monkeypatch.setattr(face._Compiler, "disable", staticmethod(torch.compiler.disable), raising=False)
    acc = client.conditional_accumulator("float32", (2,), name)
    acc.apply_grad(torch.tensor([1.0, 3.0]))
    assert acc.take_grad(1).tolist() == [1, 3]
    with pytest.raises(gradserve.InvalidArgumentError):
        acc.apply_grad(torch.ones(3))
