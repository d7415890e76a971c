"""What the client imports, and what is installed for it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS

CLIENT = Path(__file__).parents[2] / "client"
DISTRIBUTIONS = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "ml_dtypes": "ml-dtypes",
    "numpy": "numpy",
    "xxhash": "xxhash",
}
"""What a plain install brings, by what is imported of it."""
OF_EXTRAS = {
    "discovery": {"dns", "ray"},
    "jax": {"jax", "optax"},
    "torch": {"torch"},
    "tracing.py": {"opentelemetry"},
}
"""What parts of the client need beyond that; they come with an extra."""


def imported(file: Path) -> Iterator[str]:
    """Yields the names of modules of others that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and not top.startswith("gradserve"):
                yield ".".join(name.split(".")[:2]) if top == "google" else top


def test_a_plain_install_brings_what_the_client_imports_and_no_more() -> None:
    needed = {
        name
        for file in CLIENT.rglob("*.py")
        for name in imported(file)
        if name not in OF_EXTRAS.get(file.relative_to(CLIENT).parts[1], set())
    }
    assert needed == set(DISTRIBUTIONS)


@pytest.mark.parametrize(
    ("module", "loads"),
    [
        ("gradserve", set()),
        ("gradserve.aio", set()),
        ("gradserve.data", {"gradserve.data"}),
        ("gradserve.training", {"gradserve.data", "gradserve.training"}),
    ],
)
def test_importing_loads_nothing_else(module: str, loads: set[str]) -> None:
    """Neither frameworks that are installed, nor parts of the client for those who ask for them."""
    program = f"import sys, {module}; print(*sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    parts = {f"gradserve.{part}" for part in ("data", "jax", "testing", "torch", "training")}
    others = {"cupy", "dns", "gradserve_server", "jax", "numba", "opentelemetry", "optax", "psutil", "ray", "scipy"}
    assert set(modules.stdout.split()) & (parts | others | {"torch"}) == loads


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("import gradserve; print('numpy' in sys.modules, hasattr(gradserve, 'no_such_name'))", "False False"),
        (
            "import gradserve; print(gradserve.errors.__name__, gradserve.Version)",
            "gradserve.errors <class 'gradserve.Version'>",
        ),
        ("from gradserve import *; print(connect.__module__, 'errors' in globals())", "gradserve False"),
        ("import gradserve.parameters, gradserve; print(gradserve.connect.__module__)", "gradserve"),
        ("import gradserve.training.diloco.worker as found; print(found.optim.__name__)", "gradserve.optim"),
        ("import gradserve_server.app; print('gradserve.client' in sys.modules)", "False"),
    ],
)
def test_the_client_is_imported_with_the_first_of_its_names(program: str, printed: str) -> None:
    """A server needs a few of its modules."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}"], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout.startswith(printed), done.stderr


def test_commands_start_without_the_client(tmp_path: Path) -> None:
    """It is imported with gRPC, which takes time, and would write to the terminal of `serve` if it came first."""
    settings = tmp_path / "settings.toml"
    settings.write_text("max_handles = 5\n")
    program = f"""
import sys
from pathlib import Path
import click
from gradserve_server.commands.cli import cli
from gradserve_server.observe.logs import TextFormatter
from gradserve_server.config.settings import read_settings
with click.Context(cli):
    read_settings({{}}, Path({str(settings)!r}))
plan = "plan --model-bytes 1GB --workers 4 --compute 1s --bandwidth 10Gbit"
cli(plan.split(), standalone_mode=False)
print(*sorted({{"gradserve", "grpc", "numpy"}} & sys.modules.keys()), "end")
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "end", done.stdout
