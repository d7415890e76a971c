"""Takes the pictures of docs/status_page.md: of a real server, with which two networks are trained for a minute.

python deploy/status_page_pictures.py [FOLDER]

One of 16 workers is slow, another one is often too late or away. Needs Chromium.
"""

import asyncio
import io
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.async_api import Browser, async_playwright

import gradserve
from gradserve import aio
from gradserve_server.testing import LocalServer

ROOT = Path(__file__).parents[1]
NUM_WORKERS = 16
NUM_REQUIRED = 15
SECONDS = 70.0
PICTURES = {
    "status_page_light": ("light", 1440, 1000, 1640, 1),
    "status_page_dark": ("dark", 1440, 1000, 1640, 1),
    "status_page_phone_light": ("light", 390, 844, 1340, 2),
    "status_page_phone_dark": ("dark", 390, 844, 1340, 2),
}
"""The colours, the size of the window, the height of the picture, and the pixels of a point."""


async def train(client: aio.Client, name: str, shape: tuple[int, ...], pause: Callable[[], float], worker: str) -> None:
    """Sends a gradient to every round of an accumulator, or as many as it can."""
    accumulator = await client.gradient_accumulator({"w": np.zeros(shape, np.float32)}, shared_name=name)
    gradient = {"w": np.random.default_rng().standard_normal(shape).astype(np.float32)}
    step = 0
    while True:
        await asyncio.sleep(pause())
        result = await accumulator.push_pull(gradient, NUM_REQUIRED, step, worker_id=worker, on_stale="return")
        step = result.step


def pause_of(number: int) -> Callable[[], float]:
    """Returns what says how long the next step of a worker takes."""
    chance = random.Random(number)
    if number == 11:
        return lambda: chance.uniform(0.75, 0.95)
    if number == 5:
        return lambda: chance.choice((0.1, 1.2, 1.3, 3.0))
    return lambda: 0.08 + 0.35 * chance.betavariate(2, 4)


async def compute(client: aio.Client) -> None:
    """Computes ops and a layer again and again."""
    draw = np.random.default_rng().standard_normal
    x = draw((32, 14, 14, 64)).astype(np.float32)
    ones = np.ones(64, np.float32)
    step, state, w_ru, w_c, b_ru, b_c = [
        draw(shape).astype(np.float32) for shape in ((64, 32), (64, 48), (80, 96), (80, 48), (96,), (48,))
    ]
    layers = [await client.batch_norm(scope=f"resnet50/bn{number}") for number in range(1, 6)]
    while True:
        await client.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=ones, mean=ones[:0], variance=ones[:0])
        await client.raw_ops.GRUBlockCell(x=step, h_prev=state, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c)
        for layer in layers:
            await layer(x[:4])
        await asyncio.sleep(0.1)


async def fail(client: aio.Client) -> None:
    """Makes calls that are refused."""
    accumulator = await client.conditional_accumulator("float32", (64, 3), shared_name="eval/metrics")
    while True:
        with suppress(gradserve.InvalidArgumentError):
            await accumulator.apply_grad(np.ones(64, np.float32), 0)
        with suppress(gradserve.DeadlineExceededError):
            await accumulator.take_grad(4, timeout=6)


async def work(address: str) -> None:
    """Does everything until it is cancelled."""
    async with aio.connect(address) as client, asyncio.TaskGroup() as group:
        for number in range(NUM_WORKERS):
            worker = f"worker-{number:02}"
            group.create_task(train(client, "resnet50/gradients", (256, 256), pause_of(number), worker))
            group.create_task(train(client, "embedding/rows", (64, 64), pause_of(number + 100), worker))
        group.create_task(compute(client))
        group.create_task(fail(client))


async def picture(browser: Browser, url: str, path: Path) -> None:
    """Opens the page, waits, and takes the picture."""
    scheme, width, height, tall, scale = PICTURES[path.stem]
    page = await browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=scale,
    )
    await page.goto(f"{url}#container=default&name=resnet50%2Fgradients")
    await page.locator("#timeline svg").wait_for()
    await asyncio.sleep(SECONDS)
    taken = await page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": tall})
    Image.open(io.BytesIO(taken)).convert("RGB").save(path, lossless=True, quality=100)


async def main(folder: Path) -> None:
    """Trains, and takes the pictures in the end."""
    with LocalServer() as local:
        url = local.inspect(lambda server: server.observation.url)
        async with asyncio.TaskGroup() as group, async_playwright() as started:
            working = group.create_task(work(local.address))
            browser = await started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            async with asyncio.TaskGroup() as pictures:
                for name in PICTURES:
                    pictures.create_task(picture(browser, url, folder / f"{name}.webp"))
            await browser.close()
            working.cancel()


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    chosen.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(chosen))
