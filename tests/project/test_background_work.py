"""Work that goes on as long as a server or a client begins again after a failure: tasks and threads are listed here."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGINS = ("create_task", "ensure_future", "Thread")

ELSEWHERE = {
    "client/gradserve_protocol/lasting.py": "begins work again after a failure",
    "client/gradserve/transport/aio/transport.py": "lasting work, and steps and uploads whose caller gets their error",
    "client/gradserve/transport/blocking/background.py": "begins again by itself, and ends during forks",
    "client/gradserve/transport/blocking/transport.py": "one call, whose caller gets its error",
    "client/gradserve/transport/in_process.py": "one call, whose caller gets its error",
    "client/gradserve/transport/network.py": "logs errors of each piece of work, and goes on",
    "client/gradserve/transport/sockets/aio.py": "steps of one call, which waits for them",
    "server/gradserve_ray/supervision.py": "copies the lines of one server until it ends",
    "server/gradserve_server/app.py": "gives memory of the device back, once; the next expiry tries again",
    "server/gradserve_server/commands/bench.py": "one measurement, whose command waits for it",
    "server/gradserve_server/commands/run/processes.py": "runs one worker, or copies one output, until its end",
    "server/gradserve_server/commands/run/server.py": "one server until its end, which the command waits for",
    "server/gradserve_server/devices/cuda/threads.py": "handles CUDA's errors one by one",
    "server/gradserve_server/devices/cuda/sharing.py": "handles CUDA's errors one by one",
    "server/gradserve_server/devices/host/kernels.py": "logs errors of the work that it helps with, and goes on",
    "server/gradserve_server/devices/host/loading.py": "loads what calls have asked for, and logs failures",
    "server/gradserve_server/layers/batch_norm/journal.py": "one change, whose caller waits for it",
    "server/gradserve_server/observe/http/views.py": "one snapshot or picture, for whoever waits for it",
    "server/gradserve_server/observe/http/port.py": "one connection; its errors are logged",
    "server/gradserve_server/observe/port.py": "makes the HTTP port once, and logs why it cannot",
    "server/gradserve_server/observe/tracing.py": "sends the last spans, once",
    "server/gradserve_server/runtime/event_loop.py": "work of one call, whose caller gets its error",
    "server/gradserve_server/rpc/listeners/grpc/flow.py": "ends one call",
    "server/gradserve_server/rpc/listeners/grpc/calls.py": "ends connections once",
    "server/gradserve_server/rpc/listeners/grpc/endpoint.py": "ends gRPC servers",
    "server/gradserve_server/rpc/listeners/sockets/connection.py": "one call",
    "server/gradserve_server/rpc/listeners/sockets/listener.py": "one connection; its errors are logged",
    "server/gradserve_server/rpc/upstream/forwarding.py": "one call",
    "server/gradserve_server/rpc/upstream/leases.py": "holds leases for one call, which ends them",
    "server/gradserve_server/runtime/process.py": "waits for one signal, and ends the process",
    "server/gradserve_server/storage/store.py": "after an error of any kind, ends the server",
    "server/gradserve_server/tensors/transfers.py": "one upload or download",
    "server/gradserve_testing/server_thread.py": "a test kit",
    "server/gradserve_testing/network.py": "a test kit",
}
"""The files that begin tasks and threads themselves, and what becomes of a failure there."""


def begins(path: Path) -> int:
    """Returns how many tasks and threads a file begins by itself."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = Counter(each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls)
    return sum(names[name] for name in BEGINS)


def test_whatever_else_begins_a_task_or_a_thread_has_a_reason() -> None:
    folders = (
        "client/gradserve",
        "client/gradserve_protocol",
        "server/gradserve_ray",
        "server/gradserve_server",
        "server/gradserve_testing",
    )
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")]
    found = {str(each.relative_to(ROOT)) for each in files if begins(each)}
    assert found == ELSEWHERE.keys(), "use gradserve_protocol.lasting, or say here what becomes of a failure"
