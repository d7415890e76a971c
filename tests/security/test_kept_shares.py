"""What accumulators and layers keep counts for who created them, and in their container."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradserve
from gradserve_server.commands.cli import cli
from gradserve_server.config import LimitsConfig, RuntimeConfig, SecurityConfig, ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.bad_input.requests import EXHAUSTED, PushPull, Read, Take, dense, ref, zeros
from tests.security.serving import TOKENS, entry
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_calls import RawCalls

MIB = 1 << 20
BLOCK = np.ones(MIB // 4, np.float32)
NAMES = ("worker", "colleague", "chief", "visitor")


def access_text(roles: str = "chief", **limits: str) -> str:
    """Returns an access file in which everybody has a role, and tables of limits by their names."""
    entries = [entry(name, {"*": roles}, TOKENS[name]) for name in NAMES]
    entries.append(entry("admin", {"*": "admin"}, TOKENS["admin"]))
    entries.append(entry("idle", {"mine": "worker"}, TOKENS["idle"]))
    return "".join([*entries, *(f"[{name.replace('__', '.')}]\n{text}\n" for name, text in limits.items())])


def config_of(folder: Path, text: str, state: Path | None = None) -> ServerConfig:
    path = folder / "access.toml"
    path.write_text(text)
    return ServerConfig(
        limits=LimitsConfig.model_validate({"max_bytes": 20 * MIB}),
        runtime=RuntimeConfig(device="cpu", warm_up=False),
        security=SecurityConfig(access=str(path)),
        state=StateConfig() if state is None else StateConfig(state_dir=str(state)),
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    text = access_text(
        identities__chief__limits='max_bytes = "5MiB"',
        identities__visitor__limits="max_waiters = 1",
        containers__box='max_bytes = "5MiB"',
        containers__queue="max_waiters = 1",
    )
    with LocalServer(config_of(tmp_path_factory.mktemp("access"), text)) as server:
        yield server


def connect(local: LocalServer, identity: str, transport: str = "auto") -> gradserve.Client:
    return gradserve.connect(local.address, token=TOKENS[identity], timeout=PATIENCE_SECONDS, transport=transport)  # type: ignore[arg-type]


def held(local: LocalServer) -> dict[str, int]:
    """Returns the bytes, handles and bookkeeping of every identity and container that holds anything."""

    def look(server: object) -> dict[str, int]:
        usage = server.usage  # type: ignore[attr-defined]
        found: dict[str, int] = {}
        for budget in (usage.memory, usage.handles, usage.accumulators, usage.layers, usage.waiters, usage.bookkeeping):
            found |= {f"{budget.unit} of {name}": share.held for name, share in budget.identities.items()}
            found |= {f"{budget.unit} in {name}": share.held for name, share in budget.containers.items()}
            found[budget.unit] = budget.used
        return {name: amount for name, amount in found.items() if amount}

    return local.inspect(look)


Keep = Callable[[gradserve.Client, str, int], object]


def a_sum(client: gradserve.Client, container: str, number: int) -> None:
    client.gradient_accumulator(BLOCK, f"a{number}", container=container).apply_grad(BLOCK)


def a_held_gradient(client: gradserve.Client, container: str, number: int) -> None:
    accumulator = client.gradient_accumulator(BLOCK, "a0", container=container, deterministic=True)
    assert accumulator.num_accumulated() == number
    accumulator.apply_grad(BLOCK, worker_id=f"worker {number}")


def an_average(client: gradserve.Client, container: str, number: int) -> None:
    accumulator = client.gradient_accumulator(BLOCK, "a0", container=container, keep_averages=100)
    assert accumulator.info().global_step == number
    accumulator.apply_grad(BLOCK, local_step=number)
    accumulator.take_grad(1)


def a_layer(client: gradserve.Client, container: str, number: int) -> None:
    shape = (None, BLOCK.size // 4)
    client.batch_norm(scope=f"a{number}", container=container, scale=True, input_shape=shape, dtype="float32")


def a_forward(client: gradserve.Client, container: str, number: int) -> None:
    layer = client.batch_norm(scope="a0", container=container, reuse=None if number == 0 else True)
    layer.forward(BLOCK.reshape(-1, 4))


KEPT: dict[str, Keep] = {
    "sums": a_sum,
    "held gradients": a_held_gradient,
    "averages": an_average,
    "variables": a_layer,
    "forwards": a_forward,
}
TOO_MANY = {
    "chief": "too many bytes of tensor memory of 'chief': .* in use, 5242880 allowed",
    "worker in box": "too many bytes of tensor memory in the container 'box': .* in use, 5242880 allowed",
    "worker": "too many bytes of tensor memory of 'worker': .* the last 2097152 are reserved for identities",
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("what", "who", "transport"),
    [(what, who, "auto") for what in KEPT for who in TOO_MANY]
    + [(what, "chief", way) for what in ("sums", "held gradients") for way in ("grpc", "bulk")],
)
def test_limits_of_what_is_kept(local: LocalServer, what: str, who: str, transport: str) -> None:
    name, _, container = who.partition(" in ")
    keep, count = KEPT[what], 0
    with connect(local, name, transport) as client, connect(local, "colleague") as colleague:
        with contextlib.suppress(gradserve.ResourceExhaustedError):
            for count in range(20):
                keep(client, container, count)
        # A forward needs room for its outputs, too.
        most = 18 if who == "worker" else 5
        assert most - 2 * (what == "forwards") <= count <= most
        for _ in range(2):
            used = client.server_info().identities[name]["num_bytes"]
            assert used <= (5 if name == "chief" else 18) * MIB
            with pytest.raises(gradserve.ResourceExhaustedError, match=TOO_MANY[who]):
                keep(client, container, count)
        a_sum(colleague, "elsewhere", 99)
        colleague.delete_accumulator("a99", container="elsewhere")
        for each in range(count + 1):
            client.delete_accumulator(f"a{each}", container=container)
            client.delete_batch_norm_layer(f"a{each}", container=container)
    eventually(lambda: held(local) == {})


def test_a_refused_gradient_changes_nothing(local: LocalServer) -> None:
    """Memory of a payload or a stored tensor that a sum would take over counts for the creator of the accumulator."""
    with connect(local, "chief") as chief, connect(local, "worker", "bulk") as worker:
        filled = chief.put(np.zeros(9 * MIB // 2, np.uint8))
        accumulator = chief.gradient_accumulator(BLOCK, "a0")
        others = worker.gradient_accumulator(BLOCK, "a0")
        handle = worker.put(BLOCK)
        before = held(local)
        for gradient in (BLOCK, handle):
            with pytest.raises(gradserve.ResourceExhaustedError, match=TOO_MANY["chief"]):
                others.apply_grad(gradient)
        assert accumulator.num_accumulated() == 0
        # The ids of failed calls take a place for the next.
        assert {name: used for name, used in held(local).items() if "bookkeeping" not in name} == {
            name: used for name, used in before.items() if "bookkeeping" not in name
        }
        chief.delete(filled)
        others.apply_grad(BLOCK)
        others.apply_grad(handle)
        assert held(local)["bytes of tensor memory of chief"] == MIB
        np.testing.assert_array_equal(accumulator.take_grad(2).gradients, BLOCK)
        worker.delete(handle)
        chief.delete_accumulator("a0")
    eventually(lambda: held(local) == {})


def test_private_accumulators_and_layers_end_with_their_client(local: LocalServer) -> None:
    with connect(local, "worker") as worker:
        worker.gradient_accumulator(BLOCK, container="box").apply_grad(BLOCK)
        worker.batch_norm(container="box").forward(BLOCK.reshape(-1, 4))
        assert worker.server_info().containers["box"]["num_bytes"] >= 2 * MIB
    eventually(lambda: held(local) == {})


class TestWaiting:
    @pytest.mark.parametrize(
        ("who", "container", "message"),
        [
            ("visitor", "", "too many waiting calls of 'visitor': 1 asked for, 1 in use, 1 allowed"),
            ("worker", "queue", "too many waiting calls in the container 'queue': 1 asked for, 1 in use, 1 allowed"),
        ],
    )
    def test_limits(self, local: LocalServer, who: str, container: str, message: str) -> None:
        with connect(local, "chief") as chief, RawCalls(local.address, TOKENS[who]) as calls:
            accumulator = chief.gradient_accumulator({"": np.zeros(1, np.float32)}, "a0", container=container)
            name = ref("a0", container=container)
            waiting = calls.start("TakeGradient", Take(accumulator=name, num_required=2))
            eventually(lambda: local.inspect(lambda server: server.registry.factory.waiters.used) == 1)
            for method, request in (
                ("TakeGradient", Take(accumulator=name, num_required=2)),
                ("ReadAverage", Read(accumulator=name)),
                ("PushPull", PushPull(accumulator=name, num_required=2, gradient=[dense(zeros(1))])),
            ):
                failure = calls.fail(method, request)
                assert (failure.code, failure.message) == (EXHAUSTED, message)
                assert failure.retry_after == 0.5
            assert accumulator.num_accumulated() == 0
            # Those of others, or elsewhere, may wait.
            with connect(local, "colleague") as colleague:
                beside = colleague.gradient_accumulator(BLOCK, "a1", container="elsewhere")
                beside.push_pull(BLOCK, 1)
                colleague.delete_accumulator("a1", container="elsewhere")
            waiting.cancel()
            eventually(lambda: local.inspect(lambda server: server.registry.factory.waiters.used) == 0)
            accumulator.apply_grad({"": np.zeros(1, np.float32)})
            calls.call("TakeGradient", Take(accumulator=name, num_required=1))
            chief.delete_accumulator("a0", container=container)
        eventually(lambda: held(local) == {})


def test_who_sees_what_is_in_use(local: LocalServer) -> None:
    with connect(local, "worker") as worker, connect(local, "admin") as admin, connect(local, "idle") as idle:
        for number, container in enumerate(("mine", "other")):
            a_sum(worker, container, number)
        handle = worker.put(BLOCK)
        seen = {client: client.server_info() for client in (worker, admin, idle)}
        assert list(seen[worker].identities) == ["worker"]
        assert seen[worker].identities["worker"] == seen[admin].identities["worker"]
        expected = {"num_bytes": 3 * MIB, "num_handles": 1, "num_accumulators": 2, "num_waiters": 0, "num_layers": 0}
        assert expected.items() <= seen[worker].identities["worker"].items()
        assert 24 << 10 < seen[worker].identities["worker"]["bookkeeping_bytes"] < 40 << 10
        assert seen[worker].usage["bookkeeping_bytes"] == seen[worker].identities["worker"]["bookkeeping_bytes"]
        assert set(seen[idle].identities) == {"idle"}
        assert not any(seen[idle].identities["idle"].values())
        assert seen[worker].containers == seen[admin].containers
        assert {name: each["num_bytes"] for name, each in seen[admin].containers.items()} == {"mine": MIB, "other": MIB}
        assert list(seen[idle].containers) == ["mine"]
        shown = CliRunner().invoke(cli, ["info", local.address], env={"GRADSERVE_TOKEN": TOKENS["worker"]}).output
        assert "in use by identity:\n  worker: num_bytes 3.0 MiB, num_handles 1, num_accumulators 2, book" in shown
        assert "in use by container:\n" in shown
        assert "  mine: num_bytes 1.0 MiB, num_accumulators 1, book" in shown
        worker.delete(handle)
        worker.delete_accumulator("a0", container="mine")
        worker.delete_accumulator("a1", container="other")
    eventually(lambda: held(local) == {})


def test_everything_counts_again_after_a_restart(tmp_path: Path) -> None:
    """Even if that is more than is allowed by now."""
    state = tmp_path / "state"
    with LocalServer(config_of(tmp_path, access_text(), state)) as before, connect(before, "chief") as chief:
        accumulator = chief.gradient_accumulator(BLOCK, "a0", container="box", durability="gradient")
        accumulator.apply_grad(BLOCK)
        accumulator.take_grad(1)
        accumulator.apply_grad(BLOCK, local_step=1)
        a_layer(chief, "box", 0)
        used = chief.server_info()
        assert used.identities["chief"]["num_bytes"] == 3 * MIB
    limits = {"identities__chief__limits": 'max_bytes = "1MiB"', "containers__box": 'max_bytes = "1MiB"'}
    with LocalServer(config_of(tmp_path, access_text(**limits), state)) as after:
        with connect(after, "worker") as worker, connect(after, "chief") as chief:
            found = chief.server_info()
            for name in ("num_bytes", "num_accumulators", "num_layers"):
                assert found.identities["chief"][name] == used.identities["chief"][name]
                assert found.containers["box"][name] == used.containers["box"][name]
            other = worker.gradient_accumulator(BLOCK, "a1", container="box", durability="none")
            with pytest.raises(gradserve.ResourceExhaustedError, match="in the container 'box': .* 1048576 allowed"):
                other.apply_grad(BLOCK)
            for each in ("a0", "a1"):
                worker.delete_accumulator(each, container="box")
                worker.delete_batch_norm_layer(each, container="box")
            assert not chief.server_info().identities["chief"]["num_bytes"]
        eventually(lambda: held(after) == {})


def test_without_access_control_containers_are_shown() -> None:
    config = ServerConfig(runtime=RuntimeConfig(device="cpu", warm_up=False))
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        a_sum(client, "box", 0)
        found = client.server_info()
        assert (found.identities, found.containers["box"]["num_bytes"]) == ({}, MIB)
