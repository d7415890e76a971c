import gradserve
import gradserve.aio


def test_blocking(client: gradserve.Client, name: str) -> None:
    acc = client.conditional_accumulator("float32", (2,), name)
    acc.apply_grad([1, 3])
    assert acc.take_grad(1).tolist() == [1, 3]


async def test_aio(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        acc = await client.conditional_accumulator("float32", (2,), name)
        await acc.apply_grad([1, 3])
        assert (await acc.take_grad(1)).tolist() == [1, 3]
