"""A sharded accumulator on two servers, with every call that a client can make on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.placement import home_of
from gradserve_protocol.tensors import to_data_type, to_dtype
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.servers.raw_calls import Failure, RawCalls
from tests.servers.runtime import NOT_WARMED_UP

ROWS = (1, 3)
"""The rows of the component "w" on each server."""
NAME = "sharded"
HOME = home_of("", NAME, len(ROWS))
OTHER = 1 - HOME


def spec(**fields: Any) -> accumulator_pb2.AccumulatorSpec:
    """Returns the spec of an accumulator with a component of 4 x 2 float32, whose rows are on both servers."""
    pieces = [accumulator_pb2.Piece(server=server, num_rows=rows) for server, rows in enumerate(ROWS)]
    component = accumulator_pb2.ComponentSpec(
        name="w",
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        shape=accumulator_pb2.PartialShape(dims=(sum(ROWS), 2)),
        pieces=pieces,
    )
    return accumulator_pb2.AccumulatorSpec(**{"num_shards": len(ROWS), "components": [component], **fields})


def gradient(seed: int) -> NDArray[np.float32]:
    """Returns a gradient of the whole component."""
    return np.random.default_rng(seed).standard_normal((sum(ROWS), 2)).astype(np.float32)


def request_id(number: int, client_id: str = "client") -> accumulator_pb2.RequestId:
    return accumulator_pb2.RequestId(client_id=client_id, sequence=number)


class RawShards:
    """Makes calls on both servers."""

    def __init__(self, servers: list[LocalServer]) -> None:
        self.servers = servers
        self.raw = [RawCalls(each.address) for each in servers]
        self.ref = accumulator_pb2.AccumulatorRef(name=NAME)
        self.incarnation = ""
        self.epoch = 0
        """The epoch in which gradients are staged; `stage` asks for it."""

    def create(self, **fields: Any) -> None:
        """Creates the accumulator on both servers, with some fields of its spec."""
        self.create_at_home(**fields)
        self.create_part(**fields)

    def create_at_home(self, **fields: Any) -> str:
        """Creates the accumulator at its home; returns its incarnation."""
        request = messages_pb2.CreateAccumulatorRequest(accumulator=self.ref, spec=spec(**fields))
        info = self.raw[HOME].call("CreateAccumulator", request).info
        self.incarnation = info.accumulator.incarnation
        return self.incarnation

    def create_part(self, incarnation: str = "", **fields: Any) -> bool:
        """Creates the part of the other server, of the latest incarnation or another one; returns whether it is new."""
        return bool(self.raw[OTHER].call("CreateAccumulator", self.creating(incarnation, **fields)).created)

    def creating(self, incarnation: str = "", **fields: Any) -> messages_pb2.CreateAccumulatorRequest:
        """Returns the request that creates the part of the other server."""
        return messages_pb2.CreateAccumulatorRequest(
            accumulator=self.ref, spec=spec(**fields), home_incarnation=incarnation or self.incarnation
        )

    def delete_at_home(self) -> messages_pb2.DeleteAccumulatorRequest:
        """Deletes the accumulator at its home; returns the request that does so on the other server."""
        request = messages_pb2.DeleteAccumulatorRequest(accumulator=self.ref)
        gone = self.raw[HOME].call("DeleteAccumulator", request).home_incarnation
        assert gone
        return messages_pb2.DeleteAccumulatorRequest(accumulator=self.ref, home_incarnation=gone)

    def delete(self) -> None:
        """Deletes the accumulator on both servers."""
        self.raw[OTHER].call("DeleteAccumulator", self.delete_at_home())

    def staging(self, server: int, number: int, values: NDArray[np.float32], step: int = 0, **fields: Any) -> Any:
        """Returns the request that stages on one server what it has of a gradient."""
        start = sum(ROWS[:server])
        rows = values[start : start + ROWS[server]]
        tensor = tensor_pb2.Tensor(dtype=to_data_type(rows.dtype), shape=rows.shape, content=rows.tobytes())
        return messages_pb2.StageGradientRequest(
            **{
                "accumulator": self.ref,
                "request_id": request_id(number),
                "home_incarnation": self.incarnation,
                "local_step": step,
                "epoch": self.epoch,
                "gradient": [accumulator_pb2.ComponentGradient(name="w", dense=tensor)],
                **fields,
            }
        )

    def stage(self, number: int, values: NDArray[np.float32], step: int = 0) -> list[bool]:
        """Stages a gradient on both servers; returns whether each had it already."""
        asked = messages_pb2.GetNumAccumulatedRequest(accumulator=self.ref)
        self.epoch = self.raw[HOME].call("GetNumAccumulated", asked).epoch
        return [
            self.raw[server].call("StageGradient", self.staging(server, number, values, step)).duplicate
            for server in range(len(ROWS))
        ]

    def apply(self, number: int, step: int = 0, **fields: Any) -> Any:
        """Applies a staged gradient at the home."""
        return self.raw[HOME].call("ApplyGradient", self.applying(number, step, **fields))

    def applying(self, number: int, step: int = 0, **fields: Any) -> messages_pb2.ApplyGradientRequest:
        return messages_pb2.ApplyGradientRequest(
            **{
                "accumulator": self.ref,
                "request_id": request_id(number),
                "local_step": step,
                "epoch": self.epoch,
                **fields,
            }
        )

    def push(self, number: int, values: NDArray[np.float32], step: int = 0, **fields: Any) -> Any:
        """Stages and applies a gradient."""
        self.stage(number, values, step)
        return self.apply(number, step, **fields)

    def take(self, num_required: int, number: int = 1000) -> accumulator_pb2.Average:
        """Takes the average at the home."""
        request = messages_pb2.TakeGradientRequest(
            accumulator=self.ref, num_required=num_required, request_id=request_id(number)
        )
        average: accumulator_pb2.Average = self.raw[HOME].call("TakeGradient", request).average
        return average

    def reduce(self, average: accumulator_pb2.Average) -> NDArray[np.float32]:
        """Returns the values of an average, of both servers."""
        return np.concatenate([self.reduce_on(server, average) for server in range(len(ROWS))])

    def reduce_on(self, server: int, average: accumulator_pb2.Average) -> NDArray[np.float32]:
        reply = self.raw[server].call("ReduceGradients", self.reducing(average))
        (component,) = reply.average.components
        dense = component.dense
        return np.frombuffer(dense.content, to_dtype(dense.dtype)).reshape(tuple(dense.shape))

    def fail_to_reduce(self, server: int, average: accumulator_pb2.Average) -> Failure:
        return self.raw[server].fail("ReduceGradients", self.reducing(average))

    def reducing(self, average: accumulator_pb2.Average) -> messages_pb2.ReduceGradientsRequest:
        return messages_pb2.ReduceGradientsRequest(accumulator=self.ref, average=average)

    def num_held(self, server: int) -> int:
        """Returns how many gradients a server holds."""

        def look(running: Any) -> int:
            ((_, accumulator),) = running.registry.page("default", "", 1)
            return int(accumulator.shard.num_parts)

        return self.servers[server].inspect(look)

    def blobs(self, server: int) -> list[int]:
        """Returns the blobs in the state directory of a server."""

        def look(running: Any) -> list[int]:
            return list(running._state.store.blobs)

        return self.servers[server].inspect(look)

    def num_bytes(self, server: int) -> int:
        """Returns the memory of gradients and averages on a server."""
        request = messages_pb2.GetAccumulatorRequest(accumulator=self.ref)
        return int(self.raw[server].call("GetAccumulator", request).info.num_bytes)


@contextmanager
def running(folder: Path | None = None) -> Iterator[RawShards]:
    """Runs two servers, on state directories in a folder if there is one."""
    shards = RawShards([LocalServer(config_of(index, folder)).__enter__() for index in range(len(ROWS))])
    try:
        yield shards
    finally:
        for raw, server in zip(shards.raw, shards.servers, strict=True):
            raw.__exit__()
            server.__exit__()


def restart(shards: RawShards, server: int, folder: Path, parts: Parts | None = None) -> None:
    """Ends a server, and starts it on its state directory again."""
    shards.raw[server].__exit__()
    shards.servers[server].__exit__()
    shards.servers[server] = LocalServer(config_of(server, folder), parts)
    shards.servers[server].__enter__()
    shards.raw[server] = RawCalls(shards.servers[server].address)


def config_of(index: int, folder: Path | None) -> ServerConfig:
    """Returns the configuration of a server, with its state directory if there is a folder for that."""
    return ServerConfig(
        runtime=NOT_WARMED_UP,
        cluster=ClusterConfig(cluster="train", cluster_size=len(ROWS), cluster_index=index),
        state=StateConfig(state_dir=None if folder is None else str(folder / str(index))),
    )
