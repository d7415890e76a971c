"""A client and its parameters when the server is started again: it goes on by itself, or says what was lost."""

import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import accumulator_pb2
from tests.client.parameters.fake_server import FakeParameterServer, client_of, values_in

W = np.arange(6, dtype=np.float32).reshape(2, 3)


def make(client: gradserve.Client, durability: str, num_required: int = 3) -> gradserve.Parameters:
    return client.parameters({"w": W}, shared_name="llm", durability=durability, num_required=num_required)


def test_updates_of_the_open_round_are_sent_again(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client, "round")
    for worker in "ab":
        parameters.push({"w": W}, 0, worker_id=worker)
    server.restart()
    assert parameters.info().num_updates == 2
    again = server.of("Push")[2:]
    assert [(each.worker_id, each.accepted_before) for each in again] == [("a", True), ("b", True)]
    assert [each.request_id.sequence for each in again] == [each.request_id.sequence for each in server.of("Push")[:2]]
    assert values_in(again[0].update)["w"].tolist() == W.tolist()
    assert parameters.push_pull({"w": W}, 0, worker_id="c").version["w"].tolist() == (2 * W).tolist()
    server.restart()
    assert parameters.info().step == 1
    assert len(server.of("Push")) == 4


def test_updates_are_kept_until_their_round_has_ended(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client, "round", num_required=2)
    (session,) = client._calls._accumulators.watches[0]._sessions.values()
    assert session.kept is not None
    parameters.push({"w": W}, 0, worker_id="a")
    assert len(session.kept) == 1
    assert server.background, "a watch asks for the end of the round"
    parameters.push({"w": W}, 0, worker_id="b")
    assert len(session.kept) == 0
    parameters.push({"w": W}, 1, worker_id="a")
    assert len(session.kept) == 1
    with client_of(server, "other") as other:
        make(other, "round").push({"w": W}, 1, worker_id="b")
    assert parameters.read().step == 2
    assert len(session.kept) == 0


def test_a_loaded_version_ends_a_round(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client, "round")
    (session,) = client._calls._accumulators.watches[0]._sessions.values()
    parameters.push({"w": W}, 0)
    held = server.held["llm"]
    held.versions[7], held.updates = {"w": W}, []
    parameters.wait(7)
    assert session.kept is not None
    assert len(session.kept) == 0


def test_closing_waits_until_updates_are_durable(server: FakeParameterServer) -> None:
    with client_of(server) as client:
        make(client, "round").push({"w": W}, 0)
        with pytest.raises(
            gradserve.NotDurableError, match="of its updates that the server has accepted, 1 of parameters 'llm'"
        ) as raised:
            client.close(timeout=0)
        assert raised.value.gradients == {"llm": 1}


@pytest.mark.parametrize("are_made_again", [False, True])
def test_parameters_that_are_not_durable_are_lost_with_the_server(
    server: FakeParameterServer, client: gradserve.Client, are_made_again: bool
) -> None:
    """No client resets a run to the values that it happened to bring: somebody has to say how it goes on."""
    parameters = make(client, "none", num_required=1)
    parameters.push({"w": W}, 0)
    server.restart(keeps=False)
    if are_made_again:
        with client_of(server, "other") as other:
            make(other, "none")
    for _ in range(2):
        with pytest.raises(gradserve.LostError, match="has lost parameters 'default/llm' at step 1") as raised:
            parameters.push({"w": W}, 1)
        assert raised.value.accumulator == "llm"
    assert make(client, "none").read().step == 0


def test_durable_parameters_go_on(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client, "gradient")
    assert server.held["llm"].spec.durability == accumulator_pb2.DURABILITY_GRADIENT
    parameters.push({"w": W}, 0, worker_id="a")
    server.restart()
    parameters.push({"w": W}, 0, worker_id="b")
    assert len(server.of("Push")) == 3  # one was refused by the new run
    assert not any(each.accepted_before for each in server.of("Push"))
