"""The parameter vector beside a weight space."""

import itertools

import numpy as np
import pytest

from gradserve_server.ops.cudnn_rnn.cuda.network import Run, make_layout, parameters
from gradserve_server.ops.cudnn_rnn.spec import Mode, Network, split_params

NETWORKS = [
    Network(mode, layers, directions, 6 if skips else 5, 6, num_proj=projection, skip_input=skips)
    for mode, layers, directions, projection, skips in itertools.product(Mode, (1, 2, 3), (1, 2), (0, 4), (False, True))
    if mode is Mode.LSTM or not projection
]


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_parameters_cover_the_vector_as_split_params_does(network: Network) -> None:
    vector = np.arange(network.num_params)
    gates, units = network.mode.num_gates, network.num_units
    covered: list[int] = []
    for each in parameters(network):
        params = split_params(network, vector)[each.pseudo_layer]
        gate = slice(each.linear_layer % gates * units, (each.linear_layer % gates + 1) * units)
        of_input = each.linear_layer < gates
        expected = params.projection
        if each.is_bias:
            expected = (params.input_bias if of_input else params.recurrent_bias)[gate, None]
        elif each.linear_layer < 2 * gates:
            expected = (params.input_weights if of_input else params.recurrent_weights)[gate]
        actual = vector[each.start : each.start + each.size].reshape(each.rows, each.columns)
        np.testing.assert_array_equal(actual, expected)
        covered += actual.ravel().tolist()
    assert sorted(covered) == vector.tolist()


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_a_space_like_the_vector_is_one_run(network: Network) -> None:
    starts = [each.start for each in parameters(network)]
    layout = make_layout(network, starts, 4 * network.num_params, 4)
    assert layout.runs == (Run(0, 0, network.num_params),)
    assert layout.is_vector
    assert not make_layout(network, starts, 4 * network.num_params + 4, 4).is_vector


def test_a_gap_makes_another_run() -> None:
    network = Network(Mode.TANH, 1, 1, 2, 3)
    starts = [each.start + (10 if each.is_bias else 0) for each in parameters(network)]
    layout = make_layout(network, starts, 1000, 4)
    assert layout.runs == (Run(0, 0, 15), Run(15, 25, 6))
    assert not layout.is_vector


def test_a_space_that_begins_later_is_not_the_vector() -> None:
    network = Network(Mode.TANH, 1, 1, 2, 3)
    layout = make_layout(network, [each.start + 1 for each in parameters(network)], 4 * network.num_params, 4)
    assert (layout.runs, layout.is_vector) == ((Run(0, 1, 21),), False)
