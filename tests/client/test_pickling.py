"""What makes calls cannot be pickled or copied, and says what to do instead."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import gradserve
import gradserve.aio

MADE: dict[str, Callable[[gradserve.Client, str], Any]] = {
    "Client": lambda client, _: client,
    "RawOps": lambda client, _: client.raw_ops,
    "ConditionalAccumulator": lambda client, name: client.conditional_accumulator("float32", shared_name=name),
    "SparseConditionalAccumulator": lambda client, name: client.sparse_conditional_accumulator("float32", None, name),
    "GradientAccumulator": lambda client, name: client.gradient_accumulator({"w": [0.0]}, shared_name=name),
    "BatchNormLayer": lambda client, name: client.batch_norm(scope=name),
}
WAYS: dict[str, Callable[[Any], object]] = {"pickle": pickle.dumps, "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_objects_that_make_calls(client: gradserve.Client, name: str, kind: str, way: str) -> None:
    made = MADE[kind](client, name)
    with pytest.raises(gradserve.InvalidArgumentError, match=f"^a {kind} cannot be pickled or copied.*: connect where"):
        WAYS[way](made)


async def test_those_of_asyncio(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        for made in (client, await client.gradient_accumulator({"w": [0.0]}, shared_name=name)):
            with pytest.raises(gradserve.InvalidArgumentError, match="cannot be pickled or copied"):
                pickle.dumps(made)
