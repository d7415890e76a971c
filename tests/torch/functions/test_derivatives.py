"""Derivatives of derivatives, torch.func, and operations in place, beside PyTorch's own."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import gradserve
from gradserve.torch import functions
from tests.torch.functions.test_functions import moments, random, rnn_inputs

pytestmark = pytest.mark.usefixtures("_prepared_ops")


RELUS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.relu, torch.relu_)


def gru_inputs() -> list[torch.Tensor]:
    batch, size, cells = 2, 3, 2
    rows = size + cells
    shapes = [(batch, size), (batch, cells), (rows, 2 * cells), (rows, cells), (2 * cells,), (cells,)]
    return [random(*shape) for shape in shapes]


class TestSecondDerivatives:
    """gradgradcheck compares with finite differences of the first derivative, in float64."""

    @pytest.mark.parametrize(("shape", "groups"), [((3, 4), (4,)), ((2, 3, 2), (3, 2)), ((4,), (4,))])
    def test_layer_norm(self, client: gradserve.Client, shape: tuple[int, ...], groups: tuple[int, ...]) -> None:
        def normalise(*inputs: torch.Tensor) -> torch.Tensor:
            return functions.layer_norm(client, *inputs)

        assert torch.autograd.gradgradcheck(normalise, (random(*shape), random(*groups), random(*groups)))

    @pytest.mark.parametrize(
        ("shape", "data_format"), [((3, 2, 2, 2), "NCHW"), ((2, 2, 2, 1), "NHWC"), ((2, 2, 1, 2, 1), "NCDHW")]
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

        assert torch.autograd.gradgradcheck(normalise, (random(*shape), random(channels), random(channels)))

    def test_third_derivatives(self, client: gradserve.Client) -> None:
        inputs = (random(3, 4), random(4), random(4))

        def slope(*inputs: torch.Tensor) -> torch.Tensor:
            y = functions.layer_norm(client, *inputs)
            return torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)[0]

        assert torch.autograd.gradgradcheck(slope, inputs)

    def test_a_gradient_that_needs_none_itself(self, client: gradserve.Client) -> None:
        """The gradient with respect to y is a constant, but that with respect to x depends on x."""
        x = random(4, 3)
        one, zero = torch.tensor([1.0, 2.0, 3.0]).double(), torch.zeros(3).double()

        def gradient_of(normalise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
            w = torch.full((3,), 0.7).double().requires_grad_()
            y = normalise(x * w)
            (g,) = torch.autograd.grad(y[:, 0].sum(), x, create_graph=True)
            (y.square().mean() + g.square().mean()).backward()
            return w.grad

        expected = gradient_of(lambda x: torch.nn.functional.layer_norm(x, [3], one, zero))
        torch.testing.assert_close(gradient_of(lambda x: functions.layer_norm(client, x, one, zero)), expected)

    def test_16_bits(self, client: gradserve.Client) -> None:
        values = random(4, 8).detach()
        scale, offset = torch.ones(8), torch.zeros(8)

        def second(x: torch.Tensor, normalise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            (g,) = torch.autograd.grad(normalise(x).pow(3).sum(), x, create_graph=True)
            return torch.autograd.grad(g.square().sum(), x)[0]

        got = second(values.half().requires_grad_(), lambda x: functions.layer_norm(client, x, scale, offset))
        exact = second(values.half().double().requires_grad_(), lambda x: torch.nn.functional.layer_norm(x, [8]))
        assert got.dtype == torch.float16
        # Each of four tensors on the way is rounded to 11 bits.
        assert (got.double() - exact).abs().max() < 8 * torch.finfo(torch.float16).eps * exact.abs().max()

    @pytest.mark.parametrize("op", ["gru_block_cell", "cudnn_rnn"])
    @pytest.mark.parametrize("needs_gradient", [True, False], ids=["dy needs a gradient", "dy needs none"])
    def test_refused(self, client: gradserve.Client, op: str, needs_gradient: bool) -> None:
        inputs = gru_inputs() if op == "gru_block_cell" else rnn_inputs(client, {})
        result = getattr(functions, op)(client, *inputs)
        y = result if isinstance(result, torch.Tensor) else result.output
        loss = y.square().sum() if needs_gradient else y.sum()
        (gradient,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
        with pytest.raises(gradserve.InvalidArgumentError, match=f"expected at most first derivatives of {op}"):
            gradient.sum().backward()


class TestFunctionTransforms:
    def test_layer_norm(self, client: gradserve.Client) -> None:
        x, scale, offset = (random(*shape).detach() for shape in ((3, 4), (4,), (4,)))

        def loss(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return functions.layer_norm(client, x, scale, offset).pow(3).sum()

        def expected(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, [4], scale, offset).pow(3).sum()

        transforms: list[Callable[..., Any]] = [
            lambda f: torch.func.grad(f, argnums=(0, 1)),
            lambda f: torch.func.vmap(f, in_dims=(0, None)),
            lambda f: torch.func.vmap(torch.func.grad(f, argnums=1), in_dims=(0, None)),
            lambda f: torch.func.jacrev(torch.func.jacrev(f)),
        ]
        for transform in transforms:
            torch.testing.assert_close(transform(loss)(x, scale), transform(expected)(x, scale))

    @pytest.mark.parametrize("op", ["fused_batch_norm", "gru_block_cell", "cudnn_rnn"])
    def test_gradients_of_each_example(self, client: gradserve.Client, op: str) -> None:
        made: dict[str, Callable[[], Sequence[Any]]] = {
            "fused_batch_norm": lambda: [random(2, 2, 2, 2), random(2), random(2)],
            "gru_block_cell": gru_inputs,
            "cudnn_rnn": lambda: rnn_inputs(client, {}),
        }
        inputs = made[op]()
        batch = torch.stack([inputs[0].detach(), random(*inputs[0].shape).detach()])

        def loss(x: torch.Tensor) -> torch.Tensor:
            result = getattr(functions, op)(client, x, *inputs[1:])
            y: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
            return y.square().sum()

        expected = torch.stack([torch.autograd.grad(loss(x), x)[0] for x in batch.clone().requires_grad_().unbind()])
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(batch).detach(), expected)


class TestInPlace:
    """Only what a backward needs is kept, so y may be changed in place, as after PyTorch's own layers."""

    @pytest.mark.parametrize("rows", [4, 4000], ids=["small", "in shared memory"])
    def test_normalizations(self, client: gradserve.Client, rows: int) -> None:
        x, scale, offset = (random(*shape, dtype=torch.float32) for shape in ((rows, 3, 8, 8), (8,), (3,)))
        served: list[tuple[Sequence[torch.Tensor], Callable[..., torch.Tensor]]] = [
            ((x, scale, scale), lambda *given: functions.layer_norm(client, *given)),
            ((x, offset, offset), lambda *given: functions.fused_batch_norm(client, *given).y),
        ]
        for inputs, normalise in served:
            gradients = [torch.autograd.grad(relu(normalise(*inputs)).square().sum(), x)[0] for relu in RELUS]
            assert torch.equal(*gradients)

    def test_gru_block_cell(self, client: gradserve.Client) -> None:
        inputs = gru_inputs()
        functions.gru_block_cell(client, *inputs).mul_(2).sum().backward()
        assert inputs[0].grad is not None

    def test_biases_and_offsets(self, client: gradserve.Client) -> None:
        x, scale, offset = random(4, 3), random(3), random(3)
        y = functions.layer_norm(client, x, scale, offset)
        inputs = gru_inputs()
        h = functions.gru_block_cell(client, *inputs)
        with torch.no_grad():
            for each in (offset, *inputs[4:]):
                each.add_(1)
        (y.sum() + h.sum()).backward()
        assert offset.grad is not None

    def test_states_of_cudnn_rnn(self, client: gradserve.Client) -> None:
        inputs = rnn_inputs(client, {})
        result = functions.cudnn_rnn(client, *inputs)
        assert result.output_c is not None
        result.output_h.mul_(2)
        result.output_c.mul_(2)
        (result.output_h.sum() + result.output_c.sum()).backward()
        assert inputs[0].grad is not None
