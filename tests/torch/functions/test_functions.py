"""Ops of a server under PyTorch's autograd, beside finite differences and PyTorch's own float64."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import gradserve
from gradserve.torch import functions

pytestmark = pytest.mark.usefixtures("_prepared_ops")

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=dtype).requires_grad_()


def moments(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(channels).detach(), random(channels).detach().abs() + 0.5


def rnn_inputs(client: gradserve.Client, network: Mapping[str, Any], *, batch_first: bool = False) -> list[Any]:
    steps, batch, size, units = 3, 2, 3, 2
    length = client.raw_ops.CudnnRNNParamsSize(num_layers=2, num_units=units, input_size=size, T="float64", **network)
    rows = 2 * (2 if network.get("direction") == "bidirectional" else 1)
    state = (batch, rows, units) if batch_first else (rows, batch, units)
    sequences = (batch, steps, size) if batch_first else (steps, batch, size)
    cells = random(*state) if network.get("rnn_mode", "lstm") == "lstm" else None
    return [random(*sequences), random(*state), cells, random(int(length[0]))]


class TestGradients:
    """gradcheck compares with finite differences, in float64 with its own steps of 1e-6 and tolerances: their error is
    that of rounding, about 1e-16 / 1e-6, and of the step squared."""

    @pytest.mark.parametrize(
        ("shape", "data_format"),
        [((3, 2, 4, 2), "NCHW"), ((2, 2, 3, 2), "NHWC"), ((2, 2, 1, 2, 3), "NCDHW"), ((2, 2, 1, 2, 3), "NDHWC")],
    )
    @pytest.mark.parametrize("is_training", [True, False])
    def test_fused_batch_norm(
        self, client: gradserve.Client, shape: tuple[int, ...], data_format: str, is_training: bool
    ) -> None:
        channels = shape[1] if data_format.startswith("NC") else shape[-1]
        mean, variance = moments(channels)

        def normalise(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
            return functions.fused_batch_norm(
                client, x, scale, offset, mean, variance, data_format=data_format, is_training=is_training
            ).y

        assert torch.autograd.gradcheck(normalise, (random(*shape), random(channels), random(channels)))

    @pytest.mark.parametrize(("shape", "groups"), [((3, 4), (4,)), ((2, 3, 2), (3, 2)), ((4,), (4,))])
    def test_layer_norm(self, client: gradserve.Client, shape: tuple[int, ...], groups: tuple[int, ...]) -> None:
        def normalise(*inputs: torch.Tensor) -> torch.Tensor:
            return functions.layer_norm(client, *inputs)

        assert torch.autograd.gradcheck(normalise, (random(*shape), random(*groups), random(*groups)))

    def test_gru_block_cell(self, client: gradserve.Client) -> None:
        batch, size, cells = 2, 3, 2
        shapes = [
            (batch, size),
            (batch, cells),
            (size + cells, 2 * cells),
            (size + cells, cells),
            (2 * cells,),
            (cells,),
        ]

        def step(*inputs: torch.Tensor) -> torch.Tensor:
            return functions.gru_block_cell(client, *inputs)

        assert torch.autograd.gradcheck(step, [random(*shape) for shape in shapes])

    @pytest.mark.parametrize(
        "network", [{}, {"rnn_mode": "gru"}, {"rnn_mode": "rnn_tanh", "direction": "bidirectional"}]
    )
    def test_cudnn_rnn(self, client: gradserve.Client, network: dict[str, Any]) -> None:
        def run(*inputs: Any) -> tuple[torch.Tensor, ...]:
            outputs = functions.cudnn_rnn(client, *inputs, **network)
            return tuple(output for output in outputs if output is not None)

        assert torch.autograd.gradcheck(run, rnn_inputs(client, network), fast_mode=True)

    def test_sequences_of_different_lengths(self, client: gradserve.Client) -> None:
        lengths = torch.tensor([3, 1], dtype=torch.int32)

        def run(*inputs: Any) -> tuple[torch.Tensor, ...]:
            h = functions.cudnn_rnn(client, *inputs, sequence_lengths=lengths, time_major=False)
            return h.output, h.output_h

        assert torch.autograd.gradcheck(run, rnn_inputs(client, {}, batch_first=True), fast_mode=True)


class TestValues:
    """float32 is within 1e-5 of PyTorch's float64: a few roundings of 6e-8, on values of about 1, through sums of "
    "tens."""

    def compare(
        self,
        served: Callable[..., torch.Tensor],
        own: Callable[..., torch.Tensor],
        inputs: list[torch.Tensor],
        tolerance: float = 1e-5,
    ) -> None:
        exact = [each.detach().double().requires_grad_() for each in inputs]
        y, expected = served(*inputs), own(*exact)
        weights = random(*expected.shape).detach()
        (y * weights.to(y.dtype)).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(y.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)
        for mine, theirs in zip(inputs, exact, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert mine.grad.dtype == mine.dtype
            torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance)

    def test_fused_batch_norm(self, client: gradserve.Client) -> None:
        inputs = [random(4, 3, 5, 5, dtype=torch.float32), *(random(3, dtype=torch.float32) for _ in range(2))]
        self.compare(
            lambda x, scale, offset: functions.fused_batch_norm(client, x, scale, offset, epsilon=1e-3).y,
            lambda x, scale, offset: torch.nn.functional.batch_norm(x, None, None, scale, offset, True, eps=1e-3),
            inputs,
            tolerance=3e-5,  # the gradient of x is a difference of sums over 100 elements
        )

    def test_layer_norm(self, client: gradserve.Client) -> None:
        self.compare(
            lambda *inputs: functions.layer_norm(client, *inputs),
            lambda x, scale, offset: torch.nn.functional.layer_norm(x, scale.shape, scale, offset),
            [random(6, 8, dtype=torch.float32), *(random(8, dtype=torch.float32) for _ in range(2))],
        )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_16_bits(self, client: gradserve.Client, dtype: torch.dtype) -> None:
        x = random(6, 8, dtype=dtype)
        scale, offset = (random(8, dtype=torch.float32) for _ in range(2))
        self.compare(
            lambda x: functions.layer_norm(client, x, scale.detach(), offset.detach()),
            lambda x: torch.nn.functional.layer_norm(x, (8,), scale.detach().double(), offset.detach().double()),
            [x],
            tolerance=8 * torch.finfo(dtype).eps,  # results of up to 4, rounded once; so is the gradient that comes in
        )

    def test_moving_averages(self, client: gradserve.Client) -> None:
        x, scale, offset = random(4, 3, 2, 2), random(3), random(3)
        mean, variance = moments(3)
        expected_mean, expected_variance = mean.clone(), variance.clone()
        torch.nn.functional.batch_norm(x, expected_mean, expected_variance, scale, offset, True, momentum=0.1)
        result = functions.fused_batch_norm(client, x, scale, offset, mean, variance, exponential_avg_factor=0.1)
        torch.testing.assert_close(result.batch_mean, expected_mean)
        torch.testing.assert_close(result.batch_variance, expected_variance)
        assert not result.batch_mean.requires_grad

    def test_only_what_needs_a_gradient_gets_one(self, client: gradserve.Client) -> None:
        x, scale, offset = random(4, 3).detach(), random(3), random(3).detach()
        functions.layer_norm(client, x.t().contiguous().t(), scale, offset).sum().backward()
        assert scale.grad is not None
        assert x.grad is offset.grad is None

    def test_no_gradients_at_all(self, client: gradserve.Client) -> None:
        x, scale, offset = random(4, 3), random(3), random(3)
        with torch.no_grad():
            y = functions.layer_norm(client, x, scale, offset)
        assert not y.requires_grad
        assert math.isfinite(float(y.sum()))


class TestMistakes:
    def test_arguments_of_other_types(self, client: gradserve.Client) -> None:
        x, scale, offset = random(4, 3), random(3), random(3)
        given: Any
        for given, expected in (
            ((None, x, scale, offset), "expected a gradserve.Client for client, got NoneType"),
            ((client, x, [1.0] * 3, offset), "expected a torch.Tensor for scale, got list"),
        ):
            with pytest.raises(gradserve.InvalidArgumentError, match=expected):
                functions.layer_norm(*given)
        epsilon: Any = "small"
        with pytest.raises(gradserve.InvalidArgumentError, match="expected a number for epsilon, got 'small'"):
            functions.layer_norm(client, x, scale, offset, epsilon=epsilon)

    def test_a_gradient_of_the_statistics(self, client: gradserve.Client) -> None:
        x, scale, offset = random(4, 3, 2, 2), random(3), random(3)
        mean, variance = random(3), random(3).detach().abs()
        with pytest.raises(
            gradserve.InvalidArgumentError, match=r"without gradient for mean, .* pass mean\.detach\(\)"
        ):
            functions.fused_batch_norm(client, x, scale, offset, mean, variance, is_training=False)

    def test_a_backward_without_training(self, client: gradserve.Client) -> None:
        result = functions.cudnn_rnn(client, *rnn_inputs(client, {}), is_training=False)
        with pytest.raises(
            gradserve.InvalidArgumentError, match="expected is_training=True of cudnn_rnn for a backward"
        ):
            result.output.sum().backward()

    def test_what_the_server_refuses(self, client: gradserve.Client) -> None:
        with pytest.raises(gradserve.InvalidArgumentError, match="scale"):
            functions.layer_norm(client, random(4, 3), random(2), random(2))
