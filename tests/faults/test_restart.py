"""Every operation, on every way, while a server is killed and started again: all go on, and nothing counts twice."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.testing import ServerProcess
from gradserve.transport.settings import TransportName
from tests.arguments.calls import GRU, LAYER_NORM, NORMALIZE, RNN, ones
from tests.faults.operations import INPUTS, MODEL, VALUES
from tests.servers.polling import PATIENCE_SECONDS, eventually_async

WAYS: tuple[TransportName, ...] = ("grpc", "bulk", "shared_memory")
OPS = {
    "FusedBatchNormV3": NORMALIZE,
    "GRUBlockCell": GRU,
    "CudnnRNNV3": RNN,
    "LayerNorm": LAYER_NORM | {"offset": ones(3)},
}


class Work:
    """Operations of one client, each repeated until the end.

    Attributes:
        done: How often each was done.
        lost: How often something was gone that a restart does not keep.
    """

    def __init__(self, client: gradserve.aio.Client, way: str) -> None:
        self.done: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.is_over = False
        self._client = client
        self._way = way

    async def model(self, purpose: str) -> gradserve.aio.GradientAccumulator:
        return await self._client.gradient_accumulator(MODEL, f"{self._way} {purpose}", reduction_type="SUM")

    async def applies(self) -> None:
        model = await self.model("apply")
        while not self.is_over:
            await model.apply_grad({"w": VALUES})
            self.done["apply"] += 1

    async def rounds(self) -> None:
        """Applies, and takes what it applied."""
        model = await self.model("take")
        while not self.is_over:
            await model.apply_grad({"w": VALUES}, local_step=1 << 40)
            np.testing.assert_array_equal((await model.take_grad(1))["w"], VALUES)
            self.done["take"] += 1

    async def push_pulls(self) -> None:
        model = await self.model("push_pull")
        while not self.is_over:
            pulled = await model.push_pull({"w": VALUES}, 1, self.done["push_pull"])
            np.testing.assert_array_equal(pulled["w"], VALUES)
            self.done["push_pull"] += 1
            assert pulled.step == self.done["push_pull"]

    async def reads(self) -> None:
        model = await self.model("read")
        await model.push_pull({"w": VALUES}, 1)
        while not self.is_over:
            np.testing.assert_array_equal((await model.read_average())["w"], VALUES)
            self.done["read"] += 1

    async def tensors(self) -> None:
        while not self.is_over:
            handle = await self._client.put(VALUES)
            try:
                np.testing.assert_array_equal(await self._client.get(handle, release=True), VALUES)
            except (gradserve.NotFoundError, gradserve.UnavailableError):  # a download cannot go on elsewhere
                self.lost["get"] += 1
            self.done["put"] += 1

    async def op(self, name: str) -> None:
        first = None
        while not self.is_over:
            outputs = await getattr(self._client.raw_ops, name)(**OPS[name])
            first = outputs if first is None else first
            np.testing.assert_allclose(outputs[0], first[0], rtol=1e-5)
            self.done[name] += 1

    async def layer(self) -> None:
        layer = await self._client.batch_norm(scope=f"{self._way} layer", updates_collections=None)
        while not self.is_over:
            forward = await layer.forward(INPUTS)
            try:
                await layer.backward(ones(2, 3), forward)
            except (gradserve.NotFoundError, gradserve.AbortedError):
                # Aborted: the call was carried out, and the server was killed before the client had the gradients.
                self.lost["backward"] += 1
            self.done["layer"] += 1

    def all(self) -> list[asyncio.Task[None]]:
        """Begins everything."""
        loops = (self.applies, self.rounds, self.push_pulls, self.reads, self.tensors, self.layer)
        return [asyncio.create_task(each()) for each in loops] + [asyncio.create_task(self.op(name)) for name in OPS]


@pytest.mark.exhaustive
async def test_everything_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    flags = ("--state-dir", str(tmp_path / "state"), "--durability", "gradient", "--warm-up", "false")
    async with AsyncExitStack() as clients:
        with ServerProcess(tmp_path, *flags) as server:
            works = []
            for way in WAYS:
                client = gradserve.aio.connect(server.address, timeout=PATIENCE_SECONDS, transport=way)
                works.append(Work(await clients.enter_async_context(client), way))
            tasks = [task for work in works for task in work.all()]

            async def least() -> int:
                for task in tasks:
                    if task.done():
                        task.result()
                assert len(tasks) == len(works) * 10
                return min(min(work.done.values()) if len(work.done) == 10 else 0 for work in works)

            await eventually_async(least, lambda count: count >= 1)
            await asyncio.to_thread(server.restart)
            before = await least()
            await eventually_async(least, lambda count: count > before)
            for work in works:
                work.is_over = True
            await asyncio.gather(*tasks)
            for work in works:
                assert await (await work.model("apply")).num_accumulated() == work.done["apply"]
                assert (await (await work.model("take")).info()).global_step == work.done["take"]
                assert (await (await work.model("push_pull")).info()).global_step == work.done["push_pull"]
                assert all(count <= 1 for count in work.lost.values()), work.lost
            usage = (await works[0]._client.server_info()).usage
            assert (usage["num_waiters"], usage["num_handles"]) == (0, 0)
