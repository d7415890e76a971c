"""What users meet besides numbers: errors, transformations of JAX, and what stays on the server."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradserve
from gradserve.jax import functions
from tests.jax.functions import mathematics

pytestmark = pytest.mark.usefixtures("_prepared_ops")  # so that equal calls give equal bits

# Made by NumPy: JAX would compile a program for each, in every process that collects these tests.
X, SCALE, OFFSET = map(jnp.asarray, (np.arange(12.0).reshape(3, 4) ** 2, np.arange(1.0, 5.0), np.ones(4)))
IMAGES, MOMENTS = jnp.asarray(np.arange(24.0).reshape(2, 2, 2, 3)), jnp.asarray(np.arange(1.0, 4.0))
SEQUENCES, STATE = jnp.asarray(np.ones((4, 2, 3))), jnp.asarray(np.zeros((2, 2, 5)))
NOT_TRAINING: dict[str, Any] = {"rnn_mode": "rnn_tanh", "is_training": False}


def rnn_params(client: gradserve.Client, mode: str, layers: int = 1) -> Any:
    (length,) = client.raw_ops.CudnnRNNParamsSize(num_layers=layers, num_units=5, input_size=3, rnn_mode=mode)
    return jnp.sin(jnp.arange(float(length)))


def test_an_error_of_the_server_is_raised_as_it_is(client: gradserve.Client) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="offset"):
        functions.layer_norm(client, X, SCALE, jnp.ones(3))


def test_an_error_of_the_server_is_in_the_message_of_jax(client: gradserve.Client) -> None:
    compiled = jax.jit(partial(functions.layer_norm, client))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"InvalidArgumentError: expected offset of shape"):
        compiled(X, SCALE, jnp.ones(3))
    assert compiled(X, SCALE, OFFSET).shape == X.shape, "the next call of the program"


SHAPES: dict[str, Callable[[gradserve.Client], Any]] = {
    "layer_norm": lambda client: functions.layer_norm(client, 1.0, X, X),
    "fused_batch_norm": lambda client: functions.fused_batch_norm(client, 1.0, 1.0, 1.0),
    "gru_block_cell": lambda client: functions.gru_block_cell(client, *[1.0] * 6),
    "cudnn_rnn": lambda client: functions.cudnn_rnn(client, *[1.0] * 4),
}


@pytest.mark.parametrize("call", list(SHAPES.values()), ids=list(SHAPES))
def test_the_server_refuses_wrong_ranks(client: gradserve.Client, call: Callable[[gradserve.Client], Any]) -> None:
    with pytest.raises(gradserve.InvalidArgumentError):
        call(client)
    with pytest.raises(jax.errors.JaxRuntimeError, match="\nInvalidArgumentError: "):
        jax.block_until_ready(jax.jit(lambda: call(client))())


REFUSED: dict[str, tuple[str, Callable[[gradserve.Client], Any]]] = {
    "a gradient of a gradient": (
        "layer_norm to be differentiated once",
        lambda client: jax.grad(
            lambda x: jax.grad(lambda y: functions.layer_norm(client, y, SCALE, OFFSET).sum())(x).sum()
        )(X),
    ),
    "a gradient of a gradient, compiled": (
        "layer_norm to be differentiated once",
        lambda client: jax.jit(jax.hessian(lambda x: functions.layer_norm(client, x, SCALE, OFFSET).sum()))(X),
    ),
    "a gradient of a moving mean": (
        r"without gradient for mean.*jax\.lax\.stop_gradient\(mean\)",
        lambda client: jax.grad(
            lambda mean: functions.fused_batch_norm(
                client, IMAGES, MOMENTS, MOMENTS, mean, MOMENTS, is_training=False
            ).y.sum()
        )(MOMENTS),
    ),
    "a gradient without training": (
        "is_training=True of cudnn_rnn for a gradient",
        lambda client: jax.grad(
            lambda x: functions.cudnn_rnn(
                client, x, STATE[:1], None, rnn_params(client, "rnn_tanh"), **NOT_TRAINING
            ).output.sum()
        )(SEQUENCES),
    ),
}


@pytest.mark.parametrize(("message", "call"), list(REFUSED.values()), ids=list(REFUSED))
def test_refused(client: gradserve.Client, message: str, call: Callable[[gradserve.Client], Any]) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=message):
        call(client)


def test_forward_mode_is_refused_by_jax(client: gradserve.Client) -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: functions.layer_norm(client, x, SCALE, OFFSET), (X,), (X,))


def test_frozen_moments_do_not_depend_on_the_images(client: gradserve.Client) -> None:
    def of_moments(x: Any) -> Any:
        frozen = functions.fused_batch_norm(client, x, MOMENTS, MOMENTS, MOMENTS, MOMENTS, is_training=False)
        return (frozen.batch_mean * frozen.batch_variance).sum()

    assert not jax.grad(of_moments)(IMAGES).any()


def test_moving_averages(client: gradserve.Client) -> None:
    new = functions.fused_batch_norm(
        client, IMAGES, MOMENTS, MOMENTS, jnp.zeros(3), jnp.ones(3), exponential_avg_factor=0.25
    )
    np.testing.assert_allclose(new.batch_mean, 0.25 * IMAGES.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(new.batch_variance, 0.75 + 0.25 * IMAGES.var((0, 1, 2), ddof=1), rtol=1e-6)


def test_vmap_is_one_call_for_each_element(client: gradserve.Client) -> None:
    scales = jnp.stack([SCALE, 2 * SCALE])
    served = jax.vmap(lambda scale: functions.layer_norm(client, X, scale, OFFSET))(scales)
    expected = jax.vmap(lambda scale: mathematics.layer_norm(X, scale, OFFSET))(scales)
    np.testing.assert_allclose(served, expected, rtol=2e-5, atol=2e-6)


def test_a_cell_in_a_scan(client: gradserve.Client) -> None:
    weights = tuple(jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape) for shape in ((6, 6), (6, 3), (6,), (3,)))

    def last(cell: Callable[..., Any], weights: Any) -> Any:
        return jax.lax.scan(lambda h, x: (cell(x, h, *weights), None), jnp.zeros((2, 3)), SEQUENCES)[0].sum()

    served = jax.jit(jax.value_and_grad(partial(last, partial(functions.gru_block_cell, client))))(weights)
    expected = jax.value_and_grad(partial(last, mathematics.gru_block_cell))(weights)
    for actual, wanted in zip(jax.tree.leaves(served), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)


def test_sequences_end_where_they_end(client: gradserve.Client) -> None:
    params = rnn_params(client, "gru")

    def outputs(lengths: Any) -> Any:
        return functions.cudnn_rnn(
            client, SEQUENCES, STATE[:1], None, params, rnn_mode="gru", sequence_lengths=lengths
        ).output

    output = jax.jit(outputs)(jnp.asarray([4, 2]))
    assert output[:, 0].all()
    assert output[:2, 1].all()
    assert not output[2:, 1].any()


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [[4, 2], np.array([4, 2]), np.array([4, 2], np.uint32), np.array([4, 2], np.int8)],
    ids=["list", "int64", "uint32", "int8"],
)
def test_lengths_may_be_integers_of_any_width(client: gradserve.Client, x64: bool, lengths: Any) -> None:
    with jax.enable_x64(x64):
        x, h = np.ones((4, 2, 3), np.float32), np.zeros((1, 2, 5), np.float32)
        params = rnn_params(client, "gru").astype(jnp.float32)
        output = functions.cudnn_rnn(client, x, h, None, params, rnn_mode="gru", sequence_lengths=lengths).output
    assert output[:2, 1].all()
    assert not output[2:, 1].any()


def test_lengths_beyond_32_bits_do_not_wrap_around(client: gradserve.Client) -> None:
    with jax.enable_x64(True), pytest.raises(gradserve.InvalidArgumentError, match="sequence_lengths"):
        functions.cudnn_rnn(
            client,
            SEQUENCES,
            STATE[:1],
            None,
            rnn_params(client, "gru").astype(jnp.float32),
            rnn_mode="gru",
            sequence_lengths=np.array([4, 2**32 + 2]),
        )


LISTS: dict[str, Callable[[gradserve.Client, Any], Any]] = {
    "layer_norm": lambda client, x: functions.layer_norm(client, x[0], [1.0, 2, 3], [0, 0, 1]),
    "fused_batch_norm": lambda client, x: (
        functions.fused_batch_norm(client, x, [1, 2, 3], [0.0, 0, 1], [0] * 3, [1] * 3, exponential_avg_factor=0.5).y
    ),
    "gru_block_cell": lambda client, x: functions.gru_block_cell(
        client, x[0, 0], [[0]] * 2, [[1, 2]] * 4, [[0.5]] * 4, [0, 0], [1]
    ),
    "cudnn_rnn": lambda client, x: (
        functions.cudnn_rnn(client, x[0], [[[0]] * 2], None, [0.5] * 6, rnn_mode="rnn_tanh").output
    ),
}


@pytest.mark.parametrize("call", list(LISTS.values()), ids=list(LISTS))
@pytest.mark.parametrize("x64", [False, True])
def test_lists_take_the_dtype_that_belongs_to_x(
    client: gradserve.Client, call: Callable[[gradserve.Client, Any], Any], x64: bool
) -> None:
    with jax.enable_x64(x64):
        for dtype in (jnp.float32, jnp.float16, *([jnp.float64] if x64 else [])):
            assert call(client, jnp.asarray(IMAGES, dtype)).dtype == dtype


def test_a_seed_of_numpy_does_not_wrap_around(client: gradserve.Client) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="seed"):
        functions.cudnn_rnn(
            client, SEQUENCES, STATE, None, rnn_params(client, "rnn_tanh"), rnn_mode="rnn_tanh", seed=np.int64(2**40)
        )


def test_one_compiled_program_drops_other_elements_with_each_seed(client: gradserve.Client) -> None:
    params = rnn_params(client, "rnn_tanh", layers=2)

    @jax.jit  # type: ignore[untyped-decorator]
    def gradient(seed: Any) -> Any:
        def loss(params: Any) -> Any:
            return functions.cudnn_rnn(
                client, SEQUENCES, STATE, None, params, rnn_mode="rnn_tanh", dropout=0.5, seed=seed
            ).output.sum()

        return jax.value_and_grad(loss)(params)

    first, again, other = (jax.tree.map(np.asarray, gradient(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first[1], again[1])
    assert first[0] == again[0] != other[0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(client: gradserve.Client, dtype: Any) -> None:
    x = X.astype(dtype)
    for served in (partial(functions.layer_norm, client), jax.jit(partial(functions.layer_norm, client))):
        y = served(x, SCALE, OFFSET)
        assert y.dtype == dtype
        # One rounding to 8 bits of a significand, at most; and where terms cancel, those of float32 arithmetic.
        expected = mathematics.layer_norm(np.float32(x), SCALE, OFFSET)
        np.testing.assert_allclose(np.float32(y), expected, rtol=2**-8, atol=2e-6)


def test_nothing_stays_on_the_server(client: gradserve.Client) -> None:
    params = rnn_params(client, "rnn_tanh")
    before = {each.handle for each in client.list_tensors()}

    def loss(x: Any) -> Any:
        return functions.cudnn_rnn(client, x, STATE[:1], None, params, rnn_mode="rnn_tanh").output.sum()

    jax.grad(loss)(SEQUENCES)
    with pytest.raises(gradserve.InvalidArgumentError):
        jax.grad(lambda x: functions.cudnn_rnn(client, x, STATE, None, params, rnn_mode="rnn_tanh").output.sum())(
            SEQUENCES
        )
    assert {each.handle for each in client.list_tensors()} <= before
