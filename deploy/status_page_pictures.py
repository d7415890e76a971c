"""Takes the pictures of docs/status_page.md: of a real server, with which two networks are trained for a minute.

python deploy/status_page_pictures.py [FOLDER]

One of 16 workers is slow, another one is often too late or away. All send digests of equal weights. Four workers train
parameters on the server, and say how well. Two earlier runs are over. Needs Chromium.
"""

import asyncio
import hashlib
import io
import math
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import numpy as np
from PIL import Image
from playwright.async_api import Browser, FloatRect, async_playwright

import gradserve
from gradserve import aio, optim
from gradserve_testing import LocalServer

ROOT = Path(__file__).parents[1]
NUM_WORKERS = 16
NUM_REQUIRED = 15
SECONDS = 70.0
GAP = 40


@dataclass(frozen=True)
class Window:
    """A window of the browser: its size, the height of its picture, and the pixels of a point."""

    width: int
    height: int
    tall: int
    scale: int


DESKTOP = Window(1440, 1000, 1800, 1)
PHONE = Window(390, 844, 1340, 2)


async def train(client: aio.Client, name: str, shape: tuple[int, ...], pause: Callable[[], float], worker: str) -> None:
    """Sends a gradient to every round of an accumulator, or as many as it can."""
    accumulator = await client.gradient_accumulator({"w": np.zeros(shape, np.float32)}, shared_name=name)
    gradient = {"w": np.random.default_rng().standard_normal(shape).astype(np.float32)}
    step = 0
    while True:
        await asyncio.sleep(pause())
        result = await accumulator.push_pull(
            gradient,
            NUM_REQUIRED,
            step,
            worker_id=worker,
            parameters_digest=hashlib.sha256(f"{name}/{step}".encode()).digest(),
            on_stale="return",
        )
        step = result.step


def pause_of(number: int) -> Callable[[], float]:
    """Returns what says how long the next step of a worker takes."""
    chance = random.Random(number)
    if number == 11:
        return lambda: chance.uniform(0.75, 0.95)
    if number == 5:
        return lambda: chance.choice((0.1, 1.2, 1.3, 3.0))
    return lambda: 0.08 + 0.35 * chance.betavariate(2, 4)


async def train_on_server(client: aio.Client, number: int) -> None:
    """Sends updates to parameters, with what was measured; the first worker also evaluates versions."""
    chance = random.Random(number)
    parameters = await client.parameters(
        {"kernel": np.zeros((512, 512), np.float32)},
        shared_name="characters/diloco",
        optimizer=optim.SGD(0.7, momentum=0.9, nesterov=True),
        update="delta",
        num_required=4,
    )
    version = await parameters.read()
    while True:
        await asyncio.sleep(chance.uniform(0.6, 1.0))
        loss = 1.4 + 2.2 * math.exp(-version.step / 25) + chance.gauss(0, 0.04)
        delta = {"kernel": np.full((512, 512), chance.gauss(0, 0.01), np.float32)}
        metrics = {"loss": loss, "tokens/s": chance.gauss(41e3, 900)}
        version = (await parameters.push_pull(delta, version, worker_id=f"site-{number}", metrics=metrics)).version
        if number == 0 and version.step % 10 == 0:
            await parameters.report({"loss": loss + 0.08}, version)


async def train_before(client: aio.Client, name: str, num_rounds: int) -> None:
    """Trains parameters of a run that is over, and deletes them."""
    parameters = await client.parameters({"kernel": np.zeros(64, np.float32)}, shared_name=name, num_required=1)
    for number in range(num_rounds):
        loss = 1.4 + 2.2 * math.exp(-number / 25)
        await parameters.push({"kernel": np.zeros(64, np.float32)}, number, metrics={"loss": loss})
    await parameters.delete()


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
        group.create_task(train_before(client, "characters/lr-0.3", 12))
        group.create_task(train_before(client, "characters/lr-0.5", 40))
        for number in range(NUM_WORKERS):
            worker = f"worker-{number:02}"
            group.create_task(train(client, "resnet50/gradients", (256, 256), pause_of(number), worker))
            group.create_task(train(client, "embedding/rows", (64, 64), pause_of(number + 100), worker))
        for number in range(4):
            group.create_task(train_on_server(client, number))
        group.create_task(compute(client))
        group.create_task(fail(client))


async def picture(
    browser: Browser, url: str, scheme: Literal["light", "dark"], window: Window, opened: str = "past", **selected: str
) -> Image.Image:
    """Opens the page and a part of it, waits, and returns its picture, with something selected."""
    page = await browser.new_page(
        viewport={"width": window.width, "height": window.height},
        color_scheme=scheme,
        device_scale_factor=window.scale,
    )
    await page.goto(f"{url}#{urlencode({'container': 'default', 'name': 'resnet50/gradients', **selected})}")
    await page.locator("#timeline svg").wait_for()
    await page.locator(f"#{opened} > summary").click()
    await page.locator(f"#{opened} tbody tr").first.wait_for()
    await asyncio.sleep(SECONDS)
    clip: FloatRect = {"x": 0, "y": 0, "width": window.width, "height": window.tall}
    return Image.open(io.BytesIO(await page.screenshot(full_page=True, clip=clip))).convert("RGBA")


def beside(left: Image.Image, right: Image.Image) -> Image.Image:
    """Returns a picture of two."""
    both = Image.new("RGBA", (left.width + GAP + right.width, left.height))
    both.paste(left, (0, 0))
    both.paste(right, (left.width + GAP, 0))
    return both


async def pictures() -> dict[str, Image.Image]:
    """Trains, and returns the pictures by name."""
    with LocalServer() as local:
        url = local.inspect(lambda server: server.observation.url)
        async with asyncio.TaskGroup() as group, async_playwright() as started:
            working = group.create_task(work(local.address))
            browser = await started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            light, dark, phone_light, phone_dark, parameters = await asyncio.gather(
                picture(browser, url, "light", DESKTOP),
                picture(browser, url, "dark", DESKTOP),
                picture(browser, url, "light", PHONE),
                picture(browser, url, "dark", PHONE),
                picture(browser, url, "light", DESKTOP, opened="what-if", kind="parameters", name="characters/diloco"),
            )
            await browser.close()
            working.cancel()
    return {"light": light, "dark": dark, "phone": beside(phone_light, phone_dark), "parameters": parameters}


def main(folder: Path) -> None:
    """Writes the pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, taken in asyncio.run(pictures()).items():
        taken.save(folder / f"status_page_{name}.webp", lossless=True, quality=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
