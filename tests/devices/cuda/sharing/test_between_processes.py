"""Arrays on the GPU of a server in another process: in and out, in order, and copied where they cannot be shared."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve
import gradserve.aio
from gradserve.testing import ServerProcess
from gradserve.transport.sockets import gpu_regions
from tests.devices.cuda.stand_in.installing import StandIn
from tests.servers.polling import PATIENCE_SECONDS

SIZE = 20_000


def numbers(size: int = SIZE) -> NDArray[np.float32]:
    return np.arange(size, dtype=np.float32)


def connect(server: ServerProcess, **arguments: Any) -> gradserve.Client:
    return gradserve.connect(server.address, timeout=PATIENCE_SECONDS, **arguments)


def travels(client: gradserve.Client) -> str:
    return client.server_info().transport.gpu_arrays


class TestInAndOut:
    def test_a_tensor_goes_in_and_comes_out(self, server_of_gpu: ServerProcess, gpu: Any, to_host: list[int]) -> None:
        with connect(server_of_gpu) as client:
            x = gpu.array(numbers())
            handle = client.put(x)
            x.fill(0)  # the call has returned, so the memory is the client's again
            out = gpu.empty((SIZE,), np.float32)
            returned: Any = client.get(handle, out=out)
            assert returned is out
            np.testing.assert_array_equal(out.get(), numbers())
            np.testing.assert_array_equal(client.get(handle), numbers())
            assert travels(client) == "in place"
            assert to_host == []

    def test_several_at_once_beside_arrays_of_the_host(
        self, server_of_gpu: ServerProcess, gpu: Any, to_host: list[int]
    ) -> None:
        with connect(server_of_gpu) as client:
            given = [gpu.array(numbers(3)), numbers(5), numbers(), gpu.array(numbers())]
            handles = client.put_all(given)
            outs = [gpu.empty((len(each),), np.float32) for each in (numbers(3), numbers(5), numbers(), numbers())]
            client.get_all(handles, out=outs, release=True)
            for out, size in zip(outs, (3, 5, SIZE, SIZE), strict=True):
                np.testing.assert_array_equal(out.get(), numbers(size))
            assert to_host == []
            mixed = [gpu.empty((3,), np.float32), np.empty(5, np.float32)]
            client.get_all(client.put_all([numbers(3), numbers(5)]), out=mixed)
            np.testing.assert_array_equal(mixed[0].get(), numbers(3))
            np.testing.assert_array_equal(mixed[1], numbers(5))

    def test_an_op_computes_with_arrays_of_both(
        self, server_of_gpu: ServerProcess, gpu: Any, to_host: list[int]
    ) -> None:
        x = np.random.default_rng(0).standard_normal((4, 5, 5, 16)).astype(np.float32)
        channels = np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32)
        nothing = np.zeros(0, np.float32)
        with connect(server_of_gpu) as client:

            def forward(x: Any, scale: Any) -> Any:
                return client.raw_ops.FusedBatchNormV3(
                    x=x, scale=scale, offset=channels[1], mean=nothing, variance=nothing, is_training=True, keep=True
                )

            expected = forward(x, channels[0])
            found = forward(gpu.array(x), gpu.array(channels[0]))
            y = gpu.empty(x.shape, np.float32)
            client.get(found.y, out=y)
            np.testing.assert_array_equal(y.get(), client.get(expected.y))
            assert travels(client) == "in place"
            assert to_host == []

    def test_gradients_are_summed(self, server_of_gpu: ServerProcess, gpu: Any, to_host: list[int]) -> None:
        with connect(server_of_gpu) as client:
            model = client.gradient_accumulator(
                {"w": gradserve.DenseSpec("float32", (SIZE,)), "b": gradserve.DenseSpec("float32", (3,))},
                shared_name="summed",
            )
            model.apply_grad({"w": gpu.array(numbers()), "b": gpu.array(numbers(3))}, local_step=0)
            model.apply_grad({"w": numbers(), "b": gpu.array(3 * numbers(3))}, local_step=0)
            average = model.take_grad(2)
            np.testing.assert_array_equal(average["w"], numbers())
            np.testing.assert_array_equal(average["b"], 2 * numbers(3))
            pushed = model.push_pull({"w": gpu.array(numbers()), "b": numbers(3)}, num_required=1, local_step=1)
            np.testing.assert_array_equal(pushed["w"], numbers())
            assert to_host == []
            model.apply_grad({"w": gpu.array(numbers().astype(np.float64)), "b": numbers(3)}, local_step=2)
            np.testing.assert_array_equal(model.take_grad(1)["w"], numbers())
            assert to_host == [8 * SIZE], "another dtype is converted on the host"

    @pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"refuse_non_finite": True}], ids=str)
    def test_gradients_are_summed_on_the_gpu(
        self, server_of_gpu: ServerProcess, gpu: Any, to_host: list[int], options: Any
    ) -> None:
        with connect(server_of_gpu) as client:
            total = client.conditional_accumulator(
                "float32", shape=(SIZE,), shared_name=f"on the GPU {options}", device="cuda:0", **options
            )
            x = gpu.array(numbers())
            for factor in (1, 2, 3):
                total.apply_grad(x, local_step=0, worker_id=str(factor))
                x += gpu.array(numbers())  # the call has returned, so nothing reads the memory any more
            np.testing.assert_array_equal(total.take_grad(3), 2 * numbers())
            assert (travels(client), to_host) == ("in place", [])
            total.delete()

    def test_what_no_segment_can_hold_is_copied_on_the_gpu(
        self, server_of_gpu: ServerProcess, gpu: Any, to_host: list[int]
    ) -> None:
        matrix = numbers(64 * 64).reshape(64, 64)
        with connect(server_of_gpu) as client:
            whole = gpu.array(matrix)
            for part, expected in ((whole.T, matrix.T), (whole[1:, 3], matrix[1:, 3]), (whole[0, 1:], matrix[0, 1:])):
                np.testing.assert_array_equal(client.get(client.put(part)), expected)
            np.testing.assert_array_equal(client.get(client.put(gpu.empty((0, 3), np.int32))), np.empty((0, 3)))
            assert to_host == []

    async def test_asyncio(self, server_of_gpu: ServerProcess, gpu: Any, to_host: list[int]) -> None:
        async with gradserve.aio.connect(server_of_gpu.address, timeout=PATIENCE_SECONDS) as client:
            handle = await client.put(gpu.array(numbers()))
            out = gpu.empty((SIZE,), np.float32)
            await client.get(handle, out=out)
            np.testing.assert_array_equal(out.get(), numbers())
            assert (await client.server_info()).transport.gpu_arrays == "in place"
            assert to_host == []

    def test_where_it_is_put(self, server_of_gpu: ServerProcess, gpu: Any, to_host: list[int]) -> None:
        with connect(server_of_gpu) as client:
            for device in ("", "auto", "cuda:0", "cpu"):
                handle = client.put(gpu.array(numbers()), device=device)
                np.testing.assert_array_equal(client.get(handle), numbers())
            assert to_host == []


class TestOrder:
    def test_work_of_other_streams_comes_first(self, server_of_gpu: ServerProcess, gpu: Any) -> None:
        with connect(server_of_gpu) as client, gpu.cuda.Stream(non_blocking=True) as stream:
            x = gpu.zeros((SIZE,), np.float32)
            for count in range(1, 6):
                x += 1  # runs when somebody waits for it, or some milliseconds later
                handle = client.put(x)
                assert client.get(handle, release=True)[0] == count
            out = gpu.empty((SIZE,), np.float32)
            out.fill(7)
            client.get(client.put(x), out=out)
            stream.synchronize()
            assert out.get()[0] == 5, "what was begun before the call comes before what the server writes"

    def test_a_missing_event_is_noticed(
        self, server_of_gpu: ServerProcess, gpu: Any, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpu_regions.GpuRegions, "record", lambda _: None)
        with connect(server_of_gpu) as client, gpu.cuda.Stream(non_blocking=True) as stream:
            x = gpu.zeros((SIZE,), np.float32)
            stream.synchronize()
            with stand_in.machine.scheduler.waited_for_only():
                x += 1
                assert client.get(client.put(x), release=True)[0] == 0
            stream.synchronize()
            assert client.get(client.put(x), release=True)[0] == 1


class TestCopies:
    """What happens where the server cannot use the array."""

    @pytest.mark.parametrize("way", ["bulk", "grpc"])
    def test_other_ways(self, server_of_gpu: ServerProcess, gpu: Any, way: Any, to_host: list[int]) -> None:
        with connect(server_of_gpu, transport=way) as client:
            out = gpu.empty((SIZE,), np.float32)
            client.get(client.put(gpu.array(numbers())), out=out)
            np.testing.assert_array_equal(out.get(), numbers())
            client.get(client.put(gpu.array(numbers(2))), out=out[:2])
            np.testing.assert_array_equal(out.get()[:2], numbers(2))
            assert travels(client) == ""
            assert to_host == [4 * SIZE, 8]

    def test_memory_that_cuda_does_not_share(
        self, server_of_gpu: ServerProcess, gpu: Any, stand_in: StandIn, to_host: list[int]
    ) -> None:
        x, out = gpu.array(numbers()), gpu.empty((SIZE,), np.float32)
        library = gpu._driver.LIBRARY
        library.not_capable |= {library._at(each.data.ptr).start for each in (x, out)}
        with connect(server_of_gpu) as client:
            client.get(client.put(x), out=out)
            np.testing.assert_array_equal(out.get(), numbers())
            assert "copied to the host: CUDA shares only what cudaMalloc has allocated" in travels(client)
        assert to_host == [4 * SIZE]

    def test_the_client_shares_nothing(
        self, server_of_gpu: ServerProcess, gpu: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRADSERVE_GPU_ARRAYS", "copy")
        with connect(server_of_gpu) as client:
            np.testing.assert_array_equal(client.get(client.put(gpu.array(numbers()))), numbers())
            assert travels(client) == "copied to the host: GRADSERVE_GPU_ARRAYS asks for copies"

    def test_another_gpu(self, server_of_gpu: ServerProcess, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu._driver, "uuid_of", lambda _: b"another GPU: abc")
        with connect(server_of_gpu) as client:
            np.testing.assert_array_equal(client.get(client.put(gpu.array(numbers()))), numbers())
            assert travels(client) == "copied to the host: the server does not compute on this GPU"


class TestPlaces:
    """What results cannot be written to."""

    def test_other_arrays(self, server_of_gpu: ServerProcess, gpu: Any) -> None:
        with connect(server_of_gpu) as client:
            handle = client.put(numbers(4))
            read_only = np.empty(4, np.float32)
            read_only.flags.writeable = False
            for out, message in (
                (gpu.empty((3,), np.float32), r"expected an array of shape \[4\] and float32 for out, got \[3\]"),
                (gpu.empty((4,), np.int32), "expected an array of shape .* for out, got .* int32"),
                (gpu.empty((4, 2), np.float32)[:, 0], "expected an array in C order"),
                (read_only, "expected an array in C order that can be written to for out"),
                ([0.0] * 4, "expected an array of NumPy, or one in the memory of a GPU"),
            ):
                with pytest.raises(gradserve.InvalidArgumentError, match=message):
                    client.get(handle, out=out)
            with pytest.raises(gradserve.InvalidArgumentError, match="expected one array for each of the 1 handles"):
                client.get_all([handle], out=[])
            client.delete(handle)
            with pytest.raises(gradserve.NotFoundError):
                client.get(handle, out=gpu.empty((4,), np.float32))


def test_allocations_come_and_go(server_of_gpu: ServerProcess, gpu: Any, to_host: list[int]) -> None:
    """Memory that is freed, and allocated again at the same place, is never taken for what was there before."""
    pool = gpu.get_default_memory_pool()
    with connect(server_of_gpu) as client:
        for size in (SIZE, SIZE, 100, 3 * SIZE, SIZE, 100):
            x = gpu.array(numbers(size))
            np.testing.assert_array_equal(client.get(client.put(x), release=True), numbers(size))
            del x
            pool.free_all_blocks()
        assert to_host == []
