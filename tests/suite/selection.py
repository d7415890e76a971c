"""Chooses the tests of a run: `make test` has the short suite, `make test-all` the rest as well."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.suite import parts, sampling
from tests.suite.order import TESTS

EXHAUSTIVE: Mapping[str, str] = {
    "accumulators/durable/test_kills.py": "kills of a server amid hundreds of gradients",
    "accumulators/test_killed_workers.py": "workers killed amid thousands of gradients",
    "arguments/test_absurd_arguments.py": "every argument of every method, absurd",
    "benchmarks": "the benchmarks themselves, which start peers",
    "client/transport/test_progress.py": "progress of every call over every way",
    "cluster/parameters/test_kill_matrix.py": "a matrix of kills of several servers",
    "cluster/sharding/test_kill_matrix.py": "a matrix of kills of several servers",
    "cluster/test_restarts.py": "restarts of several servers under load",
    "demo": "training runs on real data",
    "devices/cuda/reduction/test_emulated.py": "emulated GPU kernels",
    "devices/cuda/sharing": "GPU memory between processes, on a simulated GPU",
    "devices/cuda/stand_in": "the service on a simulated GPU",
    "devices/cuda/test_compiles.py": "kernels compiled for every GPU",
    "devices/cuda/traffic": "memory traffic of every kernel",
    "endurance": "runs of minutes",
    "floods": "floods of requests",
    "fuzz": "mutated requests and files",
    "integrations": "training in other frameworks' loops, which make install-frameworks installs",
    "jax": "training with JAX, which make install-frameworks installs",
    "kubernetes": "manifests under a kubelet",
    "languages": "workers in JavaScript and C++",
    "layers/cuda": "emulated GPU kernels",
    "layers/durable/test_kills.py": "kills of a server",
    "layers/test_golden_served.py": "the recorded layers once more, through a server",
    "links": "emulated links",
    "monitoring": "Prometheus",
    "observe/page": "the status page in a browser",
    "ops/activation/test_cuda.py": "emulated GPU kernels",
    "ops/batch_norm/cuda/test_emulated.py": "emulated GPU kernels",
    "ops/cudnn_rnn/cuda/test_stand_in.py": "a simulated cuDNN",
    "ops/gru/test_cuda.py": "emulated GPU kernels",
    "ops/layer_norm/test_cuda.py": "emulated GPU kernels",
    "ops/test_separate_memory.py": "every op with memory of its own",
    "parameters/durable/test_kills.py": "kills of a server amid hundreds of updates",
    "process/test_memory.py": "memory of server processes under load",
    "process/test_shutdown.py": "shutdowns amid every kind of call",
    "process/test_shutdown_under_load.py": "shutdowns under load",
    "processors": "kernels for other processors",
    "project": "documentation, distributions and comparisons with releases",
    "ray": "clusters on Ray",
    "resizing/test_redividing.py": "parameters divided among more and fewer servers, interrupted everywhere",
    "resizing/test_resharding.py": "changes of the number of servers, interrupted everywhere",
    "rpc/test_lasting_endpoint.py": "servers whose gRPC was brought down",
    "simulation": "many simulated worlds",
    "testing/test_docs.py": "the documented example in a run of its own",
    "torch": "training with PyTorch, which make install-frameworks installs",
    "tracing/test_exporting.py": "exporters in processes",
    "training/test_diloco_of_frameworks.py": "training with frameworks, which make install-frameworks installs",
    "trees/parameters/test_counted_once.py": "aggregators killed at any stage",
    "trees/sharding/test_parameters.py": "aggregators of several servers, killed at any stage",
    "trees/sharding/test_restarts.py": "aggregators of several servers, killed at any stage",
    "trees/test_restarts.py": "aggregators killed at any stage",
    "tutorial": "the tutorial, typed into network namespaces",
}
"""Folders and files that the short suite leaves out, relative to tests/, with their contents. Single tests have the
marker `exhaustive`, among them all that import a framework; long tables have the marker `sampled`: see `sampling`.
Tests of many minutes have the marker `long`, and are in neither suite."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that chooses."""
    parser.addoption(
        "--suite",
        choices=("short", "rest", "all", "long"),
        default="short",
        help="short: what every change needs (make test); rest: what that leaves out; all: both; long: minutes each",
    )
    parser.addoption("--part", type=parts.part, metavar="K/N", help="only the Kth of N parts, by files")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not even import tests of other parts, nor exhaustive ones for the short suite unless they are named."""
    which = config.getoption("--part")
    if which is not None and not parts.is_in(collection_path, which):
        return True
    if config.getoption("--suite") != "short" or not collection_path.is_relative_to(TESTS):
        return None
    if str(collection_path.relative_to(TESTS)) not in EXHAUSTIVE:
        return None
    return None if any(path.is_relative_to(collection_path) for path in _named(config)) else True


def select(config: pytest.Config, items: list[pytest.Item]) -> Sequence[pytest.Item]:
    """Takes tests of the other suite out of `items`, and returns them.

    Tests stay if the command line names them, their file, or a folder of exhaustive tests.
    """
    suite = config.getoption("--suite")
    long = {item for item in items if item.get_closest_marker("long")}
    if suite in ("all", "long"):
        left_out = {item for item in items if (item in long) != (suite == "long")}
        items[:] = [item for item in items if item not in left_out]
        return list(left_out)
    named = [path for path in _named(config) if path.is_file() or _is_exhaustive(path)]
    extra = {item for item in items if _is_extra(item)}
    extra |= sampling.beside_samples(item for item in items if item not in extra)
    left_out = {
        item
        for item in items
        if item in long
        or ((item in extra) != (suite == "rest") and not any(item.path.is_relative_to(path) for path in named))
    }
    items[:] = [item for item in items if item not in left_out]
    return list(left_out)


def _is_extra(item: pytest.Item) -> bool:
    markers = ("exhaustive", "timing")
    return any(item.get_closest_marker(marker) for marker in markers) or _is_exhaustive(item.path)


@cache  # tests are many times as many as files
def _is_exhaustive(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / each) for each in EXHAUSTIVE)


def _named(config: pytest.Config) -> Iterator[Path]:
    """Yields the files and folders that the command line names."""
    for argument in config.args:
        yield (config.invocation_params.dir / argument.partition("::")[0]).resolve()
