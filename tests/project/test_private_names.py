"""Which tests use private names of the product, and why they must."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("benchmarks", "client", "deploy", "server")

REASONS: dict[str, tuple[str, ...]] = {
    "plants a fault that no caller can cause": (
        "parameters/test_followers.py",
        "simulation/accumulators/faults.py",
        "simulation/layers/faults.py",
        "simulation/leases/faults.py",
        "simulation/parameters/faults.py",
        "simulation/sharding/faults.py",
    ),
    "compares the state inside with a model of it, after each step": (
        "accumulators/test_state_machine.py",
        "parameters/durable/disk.py",
        "simulation/accounts.py",
        "simulation/accumulators/truth.py",
        "simulation/layers/part.py",
        "simulation/leases/owners.py",
        "simulation/leases/part.py",
        "simulation/parameters/part.py",
        "simulation/parameters/timing.py",
        "simulation/parameters/truth.py",
        "simulation/server.py",
        "simulation/sharding/run.py",
        "simulation/sharding/truth.py",
        "simulation/sharding/world.py",
        "simulation/world.py",
        "tensors/device_memory/test_concurrency.py",
        "tensors/device_memory/world.py",
    ),
    "is the one place that reaches into clients for other tests": ("servers/connecting.py",),
    "shortens a pause or lowers a limit that is no setting, or reads it": (
        "accumulators/test_arriving.py",
        "client/test_restarts.py",
        "commands/conftest.py",
        "commands/test_completion.py",
        "devices/test_cancellation.py",
        "devices/test_loading.py",
        "floods/test_connections.py",
        "floods/test_http.py",
        "links/test_long_links.py",
        "ops/activation/test_cpu.py",
        "ops/cudnn_rnn/cuda/test_stand_in.py",
        "ops/cudnn_rnn/test_cancellation.py",
        "ops/gru/test_cpu.py",
        "ops/layer_norm/test_cpu.py",
        "process/test_extras.py",
        "process/test_garbage.py",
        "rpc/sockets/test_early_calls.py",
        "security/test_handshakes.py",
        "torch/test_comm_hook.py",
        "torch/training_processes.py",
        "training/test_starting_again.py",
        "trees/conftest.py",
        "trees/test_local.py",
    ),
    "compares declarations, which are no part of an interface, with another source": (
        "client/gpu/test_driver.py",
        "devices/test_kernel_tables.py",
        "devices/test_sharing.py",
        "parameters/bits.py",
        "project/test_tables.py",
        "storage/test_lost_files.py",
    ),
    "moves a clock, or sees when an entry ends": (
        "cluster/sharding/test_idle_leases.py",
        "floods/test_expiry.py",
        "resources/clients/aging_server.py",
        "rpc/sharding/test_forgetting.py",
        "tensors/test_leases.py",
    ),
    "damages a database as a disk would, or reads what is recorded": (
        "accumulators/durable/disk.py",
        "accumulators/durable/test_recovery.py",
        "accumulators/places/test_durable.py",
        "layers/durable/test_recovery.py",
        "parameters/durable/test_damage.py",
        "rpc/sharding/raw_shards.py",
    ),
    "sees that bookkeeping, which shows only as memory, is given back": (
        "accumulators/test_windows.py",
        "client/parameters/test_restarts.py",
        "client/transport/test_cleanup.py",
        "conversion/test_arrays.py",
        "devices/cuda/sharing/test_what_the_server_has.py",
        "floods/test_bookkeeping.py",
        "floods/test_half_sent.py",
        "layers/client/test_updates.py",
        "layers/test_concurrency.py",
        "process/test_memory.py",
        "resources/clients/test_deleting.py",
        "resources/clients/test_holding.py",
        "resources/clients/test_idle_leases.py",
        "resources/test_lifetimes.py",
        "resources/test_queue.py",
        "rpc/accumulators/test_reply_codec.py",
        "tensors/test_receipts.py",
        "tensors/test_release.py",
        "tensors/test_uploads.py",
    ),
    "lends or prepares state that all tests of a process share": (
        "conftest.py",
        "journals.py",
        "processors/compute.py",
        "processors/cross_compile.py",
    ),
    "reads or calls an inner part, to judge or steer it alone": (
        "benchmarks/test_gpu_check.py",
        "client/transport/test_together.py",
        "commands/test_resources.py",
        "devices/cuda/cudnn/test_library.py",
        "project/blocks/test_python.py",
        "rpc/sockets/test_given_up_calls.py",
        "rpc/test_listening.py",
        "security/test_client_tokens.py",
        "security/test_rotation.py",
        "security/test_users.py",
        "trees/parameters/test_calls.py",
        "trees/servers.py",
        "trees/test_called_again.py",
        "training/test_server_restarts.py",
    ),
    "makes something happen in the middle of a step, or a step fail": (
        "accumulators/test_waiting.py",
        "client/transport/sockets/test_calls.py",
        "client/transport/sockets/test_strands.py",
        "client/transport/test_interrupted.py",
        "client/transport/test_lost_replies.py",
        "cluster/sharding/test_messages.py",
        "cluster/sharding/test_running_sums.py",
        "demo/test_training.py",
        "devices/cuda/sharing/test_between_processes.py",
        "devices/cuda/test_threads.py",
        "devices/test_shared_blocks.py",
        "floods/test_waits.py",
        "jax/test_state.py",
        "process/test_lasting_work.py",
        "rpc/sockets/conftest.py",
        "rpc/sockets/test_draining.py",
        "rpc/sockets/test_places.py",
        "rpc/sockets/test_sequence_lengths.py",
        "storage/test_store.py",
        "torch/functions/test_compile.py",
        "torch/test_average_gradients.py",
        "torch/training_threads.py",
        "training/test_attendant.py",
        "training/test_joining.py",
    ),
}
"""The tests that use private names, by the reason."""


def is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name not in ("_", "_asdict", "_fields", "_make", "_replace")
    )


def defined(tree: ast.AST) -> Iterator[str]:
    """Yields the private names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if is_private(name):
            yield name


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def used(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a file imports, reads from other objects, or replaces by their text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func) in ("setattr", "getattr", "delattr"):
            yield from (
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) and name_of(node.value.func) == "vars"
        ):
            yield from (str(each.value) for each in (node.slice,) if isinstance(each, ast.Constant))


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def private_names(source: str, product: set[str]) -> set[str]:
    """Returns the private names of the product that a test uses and does not define itself."""
    tree = ast.parse(source)
    return (product & set(used(tree))) - set(defined(tree))


def names_of_product() -> set[str]:
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py") if ".venv" not in file.parts]
    return {name for file in files for name in defined(ast.parse(file.read_text()))}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from product import _limit, LIMIT", {"_limit"}),
        ("server._queue.clear()", {"_queue"}),
        ("server._queue = []", {"_queue"}),
        ("monkeypatch.setattr(module, '_limit', 3)", {"_limit"}),
        ("vars(module)['_limit']", {"_limit"}),
        ("self._queue.clear()", set()),
        ("def _limit(): pass\n_limit()", set()),
        ("torch._other", set()),
        ("server.queue.clear()", set()),
    ],
    ids=[
        "import",
        "read",
        "set",
        "replaced",
        "looked up",
        "its own attribute",
        "its own function",
        "of a library",
        "public",
    ],
)
def test_what_is_found(source: str, found: set[str]) -> None:
    assert private_names(source, {"_limit", "_queue"}) == found


def test_tests_that_use_private_names_have_a_reason() -> None:
    product = names_of_product()
    found = {
        str(file.relative_to(ROOT / "tests")): names
        for file in (ROOT / "tests").rglob("*.py")
        if "site" not in file.parts and (names := private_names(file.read_text(), product))
    }
    listed = [file for files in REASONS.values() for file in files]
    assert sorted(found) == sorted(listed), "use a public name, or say here why there is none"
