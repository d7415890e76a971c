"""What programs written for TensorFlow's wrappers pass to raw ops, and what they are told when it does not fit."""

import warnings
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.ops import OPS
from gradserve.ops.declaration import Attribute, Required

pytestmark = pytest.mark.usefixtures("_prepared_ops")  # so that equal calls give equal bits

X = np.arange(24, dtype=np.float32).reshape(2, 2, 3, 2)
CHANNELS = np.ones(2, np.float32)
BATCH_NORM: dict[str, Any] = {"x": X, "scale": CHANNELS, "offset": CHANNELS, "mean": [], "variance": []}
SIZES: dict[str, Any] = {"num_layers": 1, "num_units": 2, "input_size": 3}


def rnn(client: gradserve.Client, layers: int, **network: Any) -> dict[str, Any]:
    length = client.raw_ops.CudnnRNNParamsSize(num_layers=layers, num_units=2, input_size=3)
    state = np.ones((layers, 2, 2), np.float32)
    params = np.linspace(-1, 1, int(length[0]), dtype=np.float32)
    return {"input": np.ones((4, 2, 3), np.float32), "input_h": state, "input_c": state, "params": params, **network}


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


class TestNone:
    """It stands for the default of every attribute that has one."""

    @pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
    def test_every_attribute_says_so(self, op: Any) -> None:
        annotations = getattr(gradserve.RawOps, op.name).__annotations__
        for each in op.arguments:
            if isinstance(each, Attribute) and not isinstance(each.default, Required):
                assert type(None) in getattr(annotations[each.name], "__args__", ()), each.name

    def test_batch_norm(self, client: gradserve.Client) -> None:
        attributes = ("epsilon", "exponential_avg_factor", "data_format", "is_training", "name")
        result = client.raw_ops.FusedBatchNormV3(**BATCH_NORM | dict.fromkeys(attributes))
        assert equal(result, client.raw_ops.FusedBatchNormV3(**BATCH_NORM))

    def test_cudnn_rnn(self, client: gradserve.Client) -> None:
        attributes: tuple[str, ...] = (
            "rnn_mode",
            "input_mode",
            "direction",
            "dropout",
            "seed",
            "seed2",
            "num_proj",
            "time_major",
        )
        arrays = rnn(client, 1)
        result = client.raw_ops.CudnnRNNV3(**arrays | dict.fromkeys(attributes), is_training=None)
        assert equal(result[:3], client.raw_ops.CudnnRNNV3(**arrays)[:3])
        length = client.raw_ops.CudnnRNNParamsSize(**SIZES)
        attributes = ("rnn_mode", "dropout", "seed", "num_proj", "T", "S")
        assert client.raw_ops.CudnnRNNParamsSize(**SIZES | dict.fromkeys(attributes)) == length

    def test_accumulators(self, client: gradserve.Client) -> None:
        handle = client.raw_ops.ConditionalAccumulator(
            dtype="float32", shape=(), container=None, shared_name=None, reduction_type=None, name=None
        )
        for value in (1.0, 2.0):
            client.raw_ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=value, name="apply")
        taken = client.raw_ops.AccumulatorTakeGradient(handle=handle, num_required=2, dtype="float32", name=None)
        assert taken == 1.5
        client.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=None)

    def test_a_name_is_text(self, client: gradserve.Client) -> None:
        name: Any = 3
        with pytest.raises(gradserve.InvalidArgumentError, match="expected text for name, got 3"):
            client.raw_ops.FusedBatchNormV3(**BATCH_NORM, name=name)
        handle = client.raw_ops.ConditionalAccumulator(dtype="float32", shape=())
        with pytest.raises(gradserve.InvalidArgumentError, match="expected text for name, got 3"):
            client.raw_ops.AccumulatorNumAccumulated(handle=handle, name=name)


class TestDtypes:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"offset": np.ones(2)}, "expected float32 for offset, as x is float32; got float64"),
            ({"x": X.astype(np.float64)}, "expected float64 for scale, as x is float64; got float32"),
            (
                {"x": X.astype(np.float16), "scale": np.ones(2)},
                "expected float32 for scale, as x is float16; got float64",
            ),
        ],
    )
    def test_one_that_follows_from_another(
        self, client: gradserve.Client, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(gradserve.InvalidArgumentError, match=message):
            client.raw_ops.FusedBatchNormV3(**BATCH_NORM | changes)

    def test_one_of_a_stored_tensor(self, client: gradserve.Client) -> None:
        with pytest.raises(gradserve.InvalidArgumentError, match="expected float32 for scale, as x is float32"):
            client.raw_ops.FusedBatchNormV3(**BATCH_NORM | {"scale": client.put(np.ones(2))})

    @pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint8])
    def test_lengths(self, client: gradserve.Client, dtype: Any) -> None:
        arrays, lengths = rnn(client, 1), [4, 2]
        result = client.raw_ops.CudnnRNNV3(**arrays, sequence_lengths=np.array(lengths, dtype))
        assert equal(result[:3], client.raw_ops.CudnnRNNV3(**arrays, sequence_lengths=lengths)[:3])
        with pytest.raises(gradserve.InvalidArgumentError, match=r"values of int32 for sequence_lengths"):
            client.raw_ops.CudnnRNNV3(**arrays, sequence_lengths=np.array([2**40, 1]))

    @pytest.mark.parametrize("flag", [np.True_, np.array(True), np.array(1), 1])
    def test_flags(self, client: gradserve.Client, flag: Any) -> None:
        several: Any = np.array([True, False])
        result = client.raw_ops.FusedBatchNormV3(**BATCH_NORM, is_training=flag)
        assert equal(result, client.raw_ops.FusedBatchNormV3(**BATCH_NORM, is_training=True))
        with pytest.raises(gradserve.InvalidArgumentError, match="expected True or False for is_training"):
            client.raw_ops.FusedBatchNormV3(**BATCH_NORM, is_training=several)

    def test_a_flag_of_a_sparse_accumulator(self, client: gradserve.Client) -> None:
        handle = client.raw_ops.SparseConditionalAccumulator(dtype="float32", shape=(3, 2))
        known: Any = np.array(False)
        client.raw_ops.SparseAccumulatorApplyGradient(
            handle=handle,
            local_step=0,
            gradient_indices=[1],
            gradient_values=[[1.0, 2.0]],
            gradient_shape=[],
            has_known_shape=known,
        )
        assert client.raw_ops.AccumulatorNumAccumulated(handle=handle) == 1


class TestWarnings:
    def test_dropout_with_one_layer(self, client: gradserve.Client) -> None:
        with pytest.warns(gradserve.IgnoredArgumentWarning, match="dropout of CudnnRNNV3 has no effect") as warned:
            client.raw_ops.CudnnRNNV3(**rnn(client, 1), dropout=0.5)
        assert warned[0].filename == __file__

    @pytest.mark.parametrize(
        ("layers", "attributes"), [(2, {"dropout": 0.5}), (1, {}), (1, {"dropout": 0.5, "is_training": False})]
    )
    def test_dropout_with_an_effect_or_none_wanted(
        self, client: gradserve.Client, layers: int, attributes: dict[str, Any]
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            client.raw_ops.CudnnRNNV3(**rnn(client, layers), **attributes)

    @pytest.mark.exhaustive
    def test_the_end_of_a_graph(self, client: gradserve.Client) -> None:
        torch = pytest.importorskip("torch")
        x = torch.ones(2, 3, requires_grad=True)
        arguments: dict[str, Any] = {"scale": [1.0] * 3, "offset": [0.0] * 3}
        with pytest.warns(UserWarning, match="x of LayerNorm requires a gradient, .*torch.functions") as warned:
            client.raw_ops.LayerNorm(x=x, **arguments)
        assert warned[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            client.raw_ops.LayerNorm(x=x.detach(), **arguments)
            with torch.no_grad():
                client.raw_ops.LayerNorm(x=x, **arguments)


@pytest.mark.parametrize("face", [gradserve.RawOps, gradserve.aio.RawOps], ids=["blocking", "asyncio"])
def test_unknown_ops(face: Any) -> None:
    ops: Any = face.__new__(face)
    with pytest.raises(
        AttributeError, match=r"no raw op 'FusedBatchNormV4'. Did you mean FusedBatchNormV3\?"
    ) as raised:
        _ = ops.FusedBatchNormV4
    assert all(op.name in str(raised.value) for op in OPS)
    assert not hasattr(ops, "Conv2D")
