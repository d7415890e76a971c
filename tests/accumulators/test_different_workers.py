"""Workers whose parameters are not those of most, by the digests that travel with their gradients."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_server.accumulators.gradient import Contribution, DifferentWorker, Summand
from gradserve_server.accumulators.identity import CallMemory
from gradserve_server.accumulators.ledger import Ledger
from gradserve_server.accumulators.records import fill_ledger, ledger_record
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_server.resources.budget import Budget
from gradserve_testing import LocalServer
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import running_tree_on
from tests.trees.workers import at_once, clients_of

A, B, C = b"A" * 16, b"B" * 16, b"C" * 16


def sent(local_step: int = 0, **digests: bytes) -> list[Contribution]:
    return [
        Contribution(local_step=local_step, worker_id=worker_id, parameters_digest=digest)
        for worker_id, digest in digests.items()
    ]


def ended(rounds: Rounds, contributions: list[Contribution]) -> tuple[DifferentWorker, ...]:
    for each in contributions:
        rounds.admit(each)
    found = rounds.comparison.compared(rounds.members.digests)
    rounds.close()
    return found


def new_ledger() -> Ledger:
    bookkeeping = Budget(1 << 20, "bytes").reserve()
    return Ledger(CallMemory(window=1, max_clients=1, silence=1.0, clock=lambda: 0.0, bookkeeping=bookkeeping))


@pytest.mark.parametrize(
    ("contributions", "different"),
    [
        (sent(), []),
        (sent(w0=A), []),
        (sent(w0=A, w1=A, w2=A), []),
        (sent(w0=A, w1=B, w2=A), ["w1"]),
        (sent(w0=B, w1=A, w2=A), ["w0"]),
        (sent(w0=A, w1=B), ["w1"]),  # of equally many, the first is taken for right
        (sent(w0=A, w1=B, w2=C), ["w1", "w2"]),
        (sent(w0=A, w1=B, w2=B, w3=A), ["w1", "w2"]),
        (sent(w0=A, w1=b"", w2=A, w3=B), ["w3"]),
        ([*sent(w0=A, w1=A), *sent(7, w2=B)], []),  # of another step
        ([Contribution(sum_of=tuple([Summand(1, f"w{at}", None, each) for at, each in enumerate((A, B, A))]))], ["w1"]),
    ],
    ids=str,
)
def test_who_differs(contributions: list[Contribution], different: list[str]) -> None:
    assert [each.worker_id for each in ended(Rounds(), contributions)] == different


def test_the_step_at_which_they_were_equal() -> None:
    rounds = Rounds()
    assert ended(rounds, sent(0, w0=A, w1=A, w2=A)) == ()
    assert ended(rounds, sent(1, w0=A)) == ()  # not compared
    assert ended(rounds, sent(2, w0=A, w1=B, w2=A)) == (DifferentWorker("w1", 0),)
    assert ended(rounds, sent(3)) == ()
    assert rounds.comparison.different == (DifferentWorker("w1", 0),)
    assert ended(rounds, sent(4, w0=A, w1=B, w2=A)) == (DifferentWorker("w1", 0),)
    assert ended(rounds, sent(5, w0=A, w1=A, w3=C)) == (DifferentWorker("w3", None),)
    assert ended(rounds, sent(6, w0=A, w1=A, w3=A)) == ()
    assert not rounds.comparison.different


def test_what_the_latest_comparison_was_and_since_when_workers_differ() -> None:
    rounds, seen = Rounds(), []
    for contributions in (
        sent(0),
        sent(1, w0=A, w1=A, w2=A),
        sent(2, w0=A, w1=B, w2=A),
        sent(3, w0=A),  # not compared
        sent(4, w0=A, w1=B, w2=C, w3=A),
        sent(5, w0=A, w1=B, w2=A),
        sent(6, w0=A, w1=A),
        sent(7, w0=A, w1=B, w2=A),
    ):
        ended(rounds, contributions)
        comparison = rounds.comparison
        seen.append((comparison.step, comparison.num_workers, dict(comparison.different_since)))
    assert seen == [
        (None, 0, {}),
        (1, 3, {}),
        (2, 3, {"w1": 2}),
        (2, 3, {"w1": 2}),
        (4, 4, {"w1": 2, "w2": 4}),
        (5, 3, {"w1": 2}),
        (6, 2, {}),
        (7, 3, {"w1": 7}),
    ]


def test_what_earlier_servers_kept_says_which_comparison_was_the_latest() -> None:
    ledger = new_ledger()
    for step, digests in enumerate(({"w0": A, "w1": A}, {"w0": A, "w1": B, "w2": C})):
        ended(ledger.rounds, sent(step, **digests))
    record = ledger_record(ledger)
    del record["different_since"]
    restored = new_ledger()
    fill_ledger(restored, record)
    comparison = restored.rounds.comparison
    assert (comparison.step, comparison.num_workers) == (1, 3)
    assert comparison.different_since == {"w1": 1, "w2": 1}  # if not for longer


def test_of_two_the_same_one_is_named_in_every_round() -> None:
    rounds = Rounds()
    assert ended(rounds, sent(0, w0=A, w1=B)) == (DifferentWorker("w1", None),)
    assert ended(rounds, sent(1, w1=B, w0=A)) == (DifferentWorker("w1", None),)


def test_a_step_that_is_set_compares_nothing_of_the_earlier_one() -> None:
    rounds = Rounds()
    for each in sent(0, w0=A, w1=B):
        rounds.admit(each)
    rounds.set_global_step(9)
    assert ended(rounds, sent(9, w2=C)) == ()


def push_all(
    client: gradserve.Client, name: str, step: int, digests: dict[str, bytes]
) -> list[gradserve.PushPullResult]:
    gradients = client.gradient_accumulator({"w": np.ones(4, np.float32)}, shared_name=name)

    def push(worker_id: str) -> gradserve.PushPullResult:
        return gradients.push_pull(
            {"w": np.ones(4, np.float32)},
            len(digests),
            step,
            worker_id=worker_id,
            parameters_digest=digests[worker_id],
        )

    with ThreadPoolExecutor(len(digests)) as threads:
        return list(threads.map(push, digests))


def test_all_workers_and_the_operator_are_told(
    client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gradserve_server.rounds")
    push_all(client, name, 0, {"w0": A, "w1": A, "w2": A})
    assert not caplog.records
    expected = (gradserve.DifferentWorker("w1", 0),)
    for step in (1, 2):
        results = push_all(client, name, step, {"w0": A, "w1": B, "w2": A})
        assert [each.different_workers for each in results] == [expected] * 3
    gradients = client.gradient_accumulator({"w": np.ones(4, np.float32)}, shared_name=name)
    assert gradients.read_average().different_workers == expected
    assert gradients.info().different_workers == expected
    (status,) = [each for each in client.server_status().accumulators if each.name == name]
    assert status.different == {"w1": 0}
    assert (status.num_compared, status.compared_step, status.different_since) == (3, 2, {"w1": 1})
    (warning,) = caplog.records
    assert "other parameters than most: 'w1' (equal at step 0)" in warning.message
    push_all(client, name, 3, {"w0": A, "w1": A, "w2": A})
    assert "equal parameters again" in caplog.records[-1].message
    assert gradients.info().different_workers == ()


@pytest.mark.parametrize("durability", ["round", "gradient"])
def test_after_a_restart(tmp_path: Path, durability: str) -> None:
    config = ServerConfig(state=StateConfig(state_dir=str(tmp_path / "state")), runtime=NOT_WARMED_UP)
    options: dict[str, Any] = {"shared_name": "net", "durability": durability}
    spec = {"w": np.ones(4, np.float32)}
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        client.gradient_accumulator(spec, **options)
        push_all(client, "net", 0, {"w0": A, "w1": A, "w2": A})
        push_all(client, "net", 1, {"w0": A, "w1": B, "w2": A})
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        gradients = client.gradient_accumulator(spec, **options)
        assert gradients.info().different_workers == (gradserve.DifferentWorker("w1", 0),)
        assert gradients.read_average().different_workers == (gradserve.DifferentWorker("w1", 0),)
        (status,) = client.server_status().accumulators
        assert (status.num_compared, status.compared_step, status.different_since) == (3, 1, {"w1": 1})
        results = push_all(client, "net", 2, {"w0": A, "w1": B, "w2": A})
        (status,) = client.server_status().accumulators
        assert (status.num_compared, status.compared_step, status.different_since) == (3, 2, {"w1": 1})
        assert {each.different_workers for each in results} == {(gradserve.DifferentWorker("w1", 0),)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters_digest": b"x" * 33}, "at most 32 bytes"),
        ({"parameters_digest": "text"}, "at most 32 bytes"),
        ({"parameters_digest": A, "worker_id": ""}, "with a worker_id"),
    ],
    ids=str,
)
def test_digests_that_cannot_be(client: gradserve.Client, name: str, options: dict[str, Any], message: str) -> None:
    gradients = client.gradient_accumulator({"w": np.ones(4, np.float32)}, shared_name=name)
    with pytest.raises(gradserve.InvalidArgumentError, match=message) as raised:
        gradients.apply_grad({"w": np.ones(4, np.float32)}, **options)
    assert raised.value.field == "parameters_digest"
    assert gradients.num_accumulated() == 0


@pytest.mark.parametrize("num_servers", [1, 2], ids=["whole", "sharded"])
def test_through_an_aggregator(num_servers: int, name: str) -> None:
    """The digests of the gradients of a sum are those of its workers."""
    with running_tree_on(num_servers, 2) as (addresses, near), clients_of(near.address, 2) as clients:
        spec = {"w": np.ones(1 << 19, np.float32)}
        made = [each.gradient_accumulator(spec, name) for each in clients]
        for step, digest in enumerate((A, B)):
            results = at_once(
                lambda acc, sent, step=step: acc.push_pull(spec, 2, step, worker_id=sent[0], parameters_digest=sent[1]),
                made,
                (("w0", A), ("w1", digest)),
            )
        ((found,),) = {each.different_workers for each in results}
        assert found in (gradserve.DifferentWorker("w1", 0), gradserve.DifferentWorker("w0", 0))
        with gradserve.connect(addresses) as top:
            assert top.gradient_accumulator(spec, name).info().different_workers == (found,)
