"""DiLoCo: what its hooks cost a training loop, the bytes of its codecs, and how long workers train over slow links.

    python -m benchmarks.diloco hooks
    python -m benchmarks.diloco bytes     # as root, which may make networks
    python -m benchmarks.diloco links     # likewise

`hooks` runs the same PyTorch loop with and without DiLoCo in turn: one worker, over shared memory. `links` has four
workers of a model of 30.8 million parameters, whose steps take as long as on an accelerator, and nothing of this
machine: it sleeps. The server's link is four times as wide as the link of one worker, as all of them share it. `bytes`
counts what the network device of a client sends for an update, with TCP's headers and its acknowledgements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import gradserve
from benchmarks.harness import provenance
from benchmarks.harness.environments import ROOT
from benchmarks.harness.links.spec import Ends, LinkSpec
from gradserve import optim
from gradserve.testing import ServerProcess
from gradserve.training.diloco.plan import Plan
from gradserve.training.diloco.worker import begin_diloco

SYNC_EVERY = 128
NUM_WORKERS = 4
NUM_PARAMETERS, NUM_FRAGMENTS = 30_800_000, 8
STEP_SECONDS = 0.029
"""With which 1 Gbit/s, at 71.5 %, is what an all-reduce of float32 leaves."""
ROUNDS, WARM_UP_ROUNDS = 4, 1
DELAY = 64
KERNEL_SECONDS = 20.0
"""The time in which a server has loaded its kernels."""
LINKS = (50.0, 200.0, 1000.0)
"""Mbit/s of one worker."""
CODECS = (None, "bf16", "int8", "int4", "e3m0", "topk")
NUM_UPDATES, NUM_VALUES = 5, 4_000_000


def hooks(repeats: int, steps: int) -> dict[str, object]:
    """Returns the median ratio of the times with and without DiLoCo."""
    import torch

    from gradserve.torch import DiLoCo

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(256, 512)

    def train() -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return time.perf_counter() - began

    ratios, plain = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(Path(folder)) as server,
        gradserve.connect(server.address, transport="shared_memory") as client,
    ):
        time.sleep(KERNEL_SECONDS)
        for number in range(-1, repeats):
            times = {}
            for is_diloco in (number % 2 == 0, number % 2 == 1):
                if is_diloco:
                    with DiLoCo(client, model, optimizer, sync_every=50, name="hooks", num_required=1):
                        times[True] = train()
                else:
                    times[False] = train()
            if number >= 0:
                ratios.append(times[True] / times[False])
                plain.append(times[False] / steps)
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "step_ms": 1000 * statistics.median(plain),
        "ratio": statistics.median(ratios),
        "middle_half": [float(each) for each in np.quantile(ratios, [0.25, 0.75])],
    }


def work(address: str, rank: int) -> None:
    """Trains as one worker; prints the part of the time in which it did."""
    names = [str(number) for number in range(NUM_FRAGMENTS)]
    values = {name: np.zeros(NUM_PARAMETERS // NUM_FRAGMENTS, np.float32) for name in names}
    updates = np.random.default_rng(rank).standard_normal(NUM_PARAMETERS // NUM_FRAGMENTS).astype(np.float32)
    with gradserve.connect(address, timeout=600, transport="bulk") as client:
        worker = begin_diloco(
            client,
            [{name: values[name]} for name in names],
            plan=Plan(SYNC_EVERY, NUM_FRAGMENTS, delay=DELAY, codec="e3m0", codec_down="int8"),
            name="links",
            num_required=NUM_WORKERS,
            outer_optimizer=optim.SGD(1.0),
            to_framework=np.asarray,
            worker_id=str(rank),
            timeout=None,
            container="",
            if_exists="join",
        )
        values = worker.values()

        def local(names: Collection[str]) -> dict[str, Any]:
            return {name: values[name] + updates for name in names}

        began = 0.0
        for step in range((WARM_UP_ROUNDS + ROUNDS) * SYNC_EVERY):
            if step == WARM_UP_ROUNDS * SYNC_EVERY:
                began = time.perf_counter()
            time.sleep(STEP_SECONDS)
            values |= worker.take_step(local)
        seconds = time.perf_counter() - began
    sys.stdout.write(f"{ROUNDS * SYNC_EVERY * STEP_SECONDS / seconds}\n")


@contextmanager
def server_behind(link: LinkSpec) -> Iterator[Ends]:
    """Runs a server behind a link."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ends = stack.enter_context(link.up())
        flags = ["--listen", ends.listen, "--bulk-listen", ends.bulk_listen, "--warm-up", "false"]
        log = stack.enter_context((folder / "log").open("w"))
        server = subprocess.Popen(
            [*ends.enter, sys.executable, "-m", "gradserve_server", "serve", *flags], stdout=log, stderr=log
        )
        stack.callback(server.wait)
        stack.callback(server.terminate)
        with gradserve.connect(ends.address, timeout=60) as client:
            client.server_info()
        yield ends


def sent_bytes() -> list[dict[str, object]]:
    """Returns the bytes that the client's device sends for an update with each codec, beside those of the update."""
    values = np.random.default_rng(1).standard_normal(NUM_VALUES).astype(np.float32)
    found: list[dict[str, object]] = []
    with server_behind(LinkSpec(1000.0)) as ends:
        counter = Path("/sys/class/net", ends.device, "statistics", "tx_bytes")
        for transport in ("grpc", "bulk"):
            for codec in CODECS:
                with gradserve.connect(ends.address, timeout=600, transport=transport) as client:
                    parameters = client.parameters({"w": np.zeros_like(values)}, shared_name=f"{transport} {codec}")
                    parameters.push({"w": values}, 0, codec=codec)  # opens connections
                    before = int(counter.read_text())
                    for step in range(1, NUM_UPDATES + 1):
                        parameters.push({"w": values}, step, codec=codec)
                    sent = (int(counter.read_text()) - before) / NUM_UPDATES
                found.append({"transport": transport, "codec": codec, "bytes": sent, "part": sent / values.nbytes})
                print(found[-1], flush=True)
    return found


def over(megabits: float) -> dict[str, object]:
    """Returns the utilisation over links of so many Mbit/s."""
    with server_behind(LinkSpec(NUM_WORKERS * megabits)) as ends:
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.diloco", "worker", ends.address, str(rank)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(NUM_WORKERS)
        ]
        found = [float(each.communicate()[0]) for each in workers]
    return {"megabits": megabits, "utilisation": statistics.mean(found)}


def main() -> None:
    """Runs what the command line asks for; prints it and writes a result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco", description=__doc__)
    parser.add_argument("what", choices=["hooks", "bytes", "links", "worker"])
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=80)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "worker":
        work(arguments.arguments[0], int(arguments.arguments[1]))
        return
    facts = provenance.describe()
    found: Any = []
    if arguments.what == "hooks":
        found = hooks(arguments.repeats, arguments.steps)
    elif arguments.what == "bytes":
        found = sent_bytes()
    else:
        for megabits in LINKS:
            found.append(over(megabits))
            print(found[-1], flush=True)
    path = arguments.json or ROOT / "benchmarks" / "results" / "diloco" / f"{arguments.what}.json"
    path.write_text(json.dumps({"provenance": facts, "results": found}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
