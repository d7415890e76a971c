"""A call of every method of a client, accumulators and layers, and how it fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gradserve
import gradserve.aio

A_MODEL = Path(__file__).parent / "parameters" / "golden.safetensors"
CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "server_info": lambda client, _: client.server_info(),
    "server_log": lambda client, _: client.server_log(),
    "server_status": lambda client, _: client.server_status(),
    "list_accumulators": lambda client, _: client.list_accumulators(),
    "delete_accumulator": lambda client, _: client.delete_accumulator("nobody's"),
    "delete_batch_norm_layer": lambda client, _: client.delete_batch_norm_layer("nobody's"),
    "list_tensors": lambda client, _: client.list_tensors(),
    "put": lambda client, _: client.put([1.0]),
    "put_all": lambda client, _: client.put_all([[1.0], 2]),
    "get": lambda client, made: client.get(made["handle"]),
    "get_all": lambda client, made: client.get_all([made["handle"]]),
    "delete": lambda client, made: client.delete(made["handle"]),
    "conditional_accumulator": lambda client, _: client.conditional_accumulator("float32"),
    "sparse_conditional_accumulator": lambda client, _: client.sparse_conditional_accumulator("float32"),
    "gradient_accumulator": lambda client, _: client.gradient_accumulator({"w": np.zeros(2)}),
    "batch_norm": lambda client, _: client.batch_norm(),
    "list_batch_norm_layers": lambda client, _: client.list_batch_norm_layers(),
    "run_updates": lambda client, _: client.run_updates(),
    "num_accumulated": lambda _, made: made["dense"].num_accumulated(),
    "set_global_step": lambda _, made: made["dense"].set_global_step(1),
    "info": lambda _, made: made["dense"].info(),
    "delete accumulator": lambda _, made: made["dense"].delete(),
    "dense apply_grad": lambda _, made: made["dense"].apply_grad(1),
    "dense take_grad": lambda _, made: made["dense"].take_grad(1, timeout=0.2),
    "dense read_average": lambda _, made: made["dense"].read_average(timeout=0.2),
    "large apply_grad": lambda _, made: made["large"].apply_grad(np.zeros(1 << 16)),
    "sparse apply_grad": lambda _, made: made["sparse"].apply_grad([0], [1.0]),
    "sparse apply_indexed_slices_grad": lambda _, made: made["sparse"].apply_indexed_slices_grad(
        gradserve.IndexedSlices(np.ones(1), np.zeros(1, np.int64))
    ),
    "sparse take_grad": lambda _, made: made["sparse"].take_indexed_slices_grad(1, timeout=0.2),
    "sparse read_average": lambda _, made: made["sparse"].read_average(timeout=0.2),
    "model apply_grad": lambda _, made: made["model"].apply_grad({"w": np.zeros(2)}),
    "model take_grad": lambda _, made: made["model"].take_grad(1, timeout=0.2),
    "model read_average": lambda _, made: made["model"].read_average(timeout=0.2),
    "model push_pull": lambda _, made: made["model"].push_pull({"w": np.zeros(2)}, 9, timeout=0.2),
    "parameters": lambda client, _: client.parameters({"w": np.zeros(2)}),
    "list_parameters": lambda client, _: client.list_parameters(),
    "delete_parameters": lambda client, _: client.delete_parameters("nobody's"),
    "parameters read": lambda _, made: made["parameters"].read(),
    "parameters push": lambda _, made: made["parameters"].push({"w": np.zeros(2)}, 0),
    "parameters push_pull": lambda _, made: made["parameters"].push_pull({"w": np.zeros(2)}, 0, timeout=0.2),
    "parameters wait": lambda _, made: made["parameters"].wait(9, timeout=0.2),
    "parameters info": lambda _, made: made["parameters"].info(),
    "parameters rounds": lambda _, made: made["parameters"].rounds(),
    "parameters report": lambda _, made: made["parameters"].report({"loss": 1}, 0),
    "parameters evaluations": lambda _, made: made["parameters"].evaluations(),
    "parameters evaluate": lambda _, made: made["parameters"].evaluate(lambda _: {"loss": 1}, until=0),
    "parameters change": lambda _, made: made["parameters"].change(num_required=8),
    "parameters save": lambda _, made: made["parameters"].save("nowhere/parameters"),
    "parameters load": lambda _, made: made["parameters"].load(A_MODEL),
    "parameters fork": lambda _, made: made["parameters"].fork(shared_name="fork"),
    "parameters delete": lambda _, made: made["parameters"].delete(),
    "layer call": lambda _, made: made["layer"](np.zeros((2, 3), np.float32)),
    "layer forward": lambda _, made: made["layer"].forward(np.zeros((2, 3), np.float32)),
    "layer backward": lambda _, made: made["layer"].backward(np.zeros((2, 3), np.float32), made["forward"]),
    "layer run_updates": lambda _, made: made["layer"].run_updates([made["forward"]]),
    "layer release": lambda _, made: made["layer"].release(made["forward"]),
    "layer get_variables": lambda _, made: made["layer"].get_variables(),
    "layer set_variables": lambda _, made: made["layer"].set_variables({"beta": np.zeros(3)}),
    "layer describe": lambda _, made: made["layer"].describe(),
    "layer delete": lambda _, made: made["layer"].delete(),
}


def make_things(client: gradserve.Client) -> dict[str, Any]:
    layer = client.batch_norm()
    return {
        "layer": layer,
        "forward": layer.forward(np.zeros((2, 3), np.float32)),
        "dense": client.conditional_accumulator("float32", ()),
        "large": client.conditional_accumulator("float64", (1 << 16,)),
        "sparse": client.sparse_conditional_accumulator("float32"),
        "model": client.gradient_accumulator({"w": np.zeros(2)}),
        "parameters": client.parameters({"w": np.zeros(2)}, num_required=9),
        "handle": client.put([1.0]),
    }


async def make_things_aio(client: gradserve.aio.Client) -> dict[str, Any]:
    layer = await client.batch_norm()
    return {
        "layer": layer,
        "forward": await layer.forward(np.zeros((2, 3), np.float32)),
        "dense": await client.conditional_accumulator("float32", ()),
        "large": await client.conditional_accumulator("float64", (1 << 16,)),
        "sparse": await client.sparse_conditional_accumulator("float32"),
        "model": await client.gradient_accumulator({"w": np.zeros(2)}),
        "parameters": await client.parameters({"w": np.zeros(2)}, num_required=9),
        "handle": await client.put([1.0]),
    }


def failure_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


async def failure_of_aio(call: Any) -> BaseException | None:
    try:
        await call
    except BaseException as error:
        return error
    return None
