"""The layer beside TensorFlow's, without a socket: every recorded case."""

import pytest

from tests.golden.batch_norm_layer import LayerCase, load_layer_cases
from tests.layers import LayerBench
from tests.recorded_layers import check_recorded


@pytest.mark.parametrize("case", load_layer_cases(), ids=str)
def test_it_is_tensorflows(case: LayerCase) -> None:
    check_recorded(case, LayerBench)
