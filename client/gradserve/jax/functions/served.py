"""Differentiable JAX functions over ops of a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from gradserve.jax.leaves import place_of
from gradserve_protocol.errors import InvalidArgumentError

Arrays: TypeAlias = Sequence[Any]


@dataclass(frozen=True)
class ServedOp:
    """An op with its gradient, as calls of a server.

    Attributes:
        name: The name of the function, for messages.
        forward: Called with the inputs; returns the outputs, then what else the gradient needs.
        backward: Called with the inputs, everything that `forward` returned, and the gradients with respect to the
            first `num_served` outputs; returns the gradients with respect to the inputs in `differentiable`.
        results: The shapes and dtypes of what `forward` returns.
        num_outputs: How many of these are outputs.
        num_served: The number of outputs, counted from the first, whose gradients the server takes.
        differentiable: The names of the inputs, counted from the first, that `backward` returns gradients of.
        others: The names of the other inputs.
        refusal: Why there is no gradient at all, if there is none.
        rest: Adds the gradients through the other outputs, in JAX; needed if there are others. Called with the
            inputs, everything that `forward` returned, the gradients with respect to the other outputs (None for
            one that the loss does not depend on), and what `backward` returned; returns that with its addition.
    """

    name: str
    forward: Callable[..., Arrays]
    backward: Callable[..., Arrays]
    results: Sequence[jax.ShapeDtypeStruct]
    num_outputs: int
    num_served: int
    differentiable: Sequence[str]
    others: Sequence[str] = ()
    refusal: str = ""
    rest: Callable[[Arrays, Arrays, Arrays, Arrays], Arrays] | None = None

    def __call__(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the op; returns its outputs.

        Raises:
            InvalidArgumentError: A gradient that there is not was asked for.
            GradserveError: The server's error, outside `jax.jit`; inside, it is in the message of JAX's error.
        """
        differentiated = jax.custom_vjp(lambda *given: self._computed(given)[: self.num_outputs])
        differentiated.defvjp(self._forward_rule, self._backward_rule, symbolic_zeros=True)
        outputs: tuple[jax.Array, ...] = differentiated(*inputs)
        return outputs

    def _computed(self, inputs: Arrays) -> tuple[jax.Array, ...]:
        return called(self.name, self.forward, self.results, inputs)

    def _forward_rule(self, *primals: Any) -> tuple[tuple[jax.Array, ...], Any]:
        """Is called if any of the primals has a gradient, or may have one."""
        names = (*self.differentiable, *self.others)
        for name, primal in zip(names, primals, strict=False):
            if primal.perturbed and (self.refusal or name in self.others):
                raise InvalidArgumentError(self.refusal or _not_differentiable(self.name, name), field=name)
        inputs = tuple(primal.value for primal in primals)
        results = self._computed(inputs)
        return results[: self.num_outputs], (inputs, results)

    def _backward_rule(self, saved: Any, cotangents: Arrays) -> tuple[jax.Array | None, ...]:
        inputs, results = saved
        gradients = [_materialized(each) for each in cotangents[: self.num_served]]
        num_inputs, num_results = len(inputs), len(results)
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in inputs[: len(self.differentiable)]]

        def backward(*arrays: Any) -> Arrays:
            return self.backward(
                arrays[:num_inputs], arrays[num_inputs : num_inputs + num_results], arrays[num_inputs + num_results :]
            )

        computed: Arrays = called(self.name, backward, shapes, (*inputs, *results, *gradients))
        others = [None if isinstance(each, SymbolicZero) else each for each in cotangents[self.num_served :]]
        if self.rest is not None and any(each is not None for each in others):
            computed = self.rest(inputs, results, others, computed)
        return *computed, *(None for _ in inputs[len(self.differentiable) :])


def called(
    name: str, compute: Callable[..., Arrays], results: Sequence[jax.ShapeDtypeStruct], arrays: Arrays
) -> tuple[jax.Array, ...]:
    """Calls a server, now or when the program that is being traced runs.

    The ops are functions of their inputs, so JAX may leave out a call whose results nobody uses, or repeat one.

    Args:
        name: The name of the function, for messages.
        compute: Makes the call; takes arrays, and returns them.
        results: The shapes and dtypes of its results.
        arrays: Its arguments.
    """
    if any(isinstance(each, jax.core.Tracer) for each in arrays):
        staged: tuple[jax.Array, ...] = _staged(name, compute, tuple(results))(*arrays)
        return staged
    place = place_of(arrays[0]) if len(arrays[0].devices()) == 1 else None
    return tuple(jax.device_put(each, place) for each in compute(*arrays))


def _staged(name: str, compute: Callable[..., Arrays], results: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[..., Any]:
    """Returns a call as a function for programs of JAX, which refuses to be differentiated itself."""

    def stage(*arrays: Any) -> Any:
        return jax.pure_callback(lambda *given: tuple(compute(*given)), results, *arrays, vmap_method="sequential")

    def refuse(_primals: Any, _tangents: Any) -> Any:
        raise InvalidArgumentError(
            f"expected {name} to be differentiated once, got a gradient of its gradient, which the server does not "
            "compute; put jax.lax.stop_gradient around the inner gradient, or write this layer in JAX"
        )

    guarded: Any = jax.custom_jvp(stage)
    guarded.defjvp(refuse)
    function: Callable[..., Any] = guarded
    return function


def as_array(value: Any, dtype: Any) -> jax.Array:
    """Returns a value as an array: numbers and lists in the given dtype, an array in its own.

    Without a dtype, JAX would choose one for a list that depends on `jax_enable_x64`.
    """
    return jnp.asarray(value) if hasattr(value, "dtype") else jnp.asarray(value, dtype)


def parameter_dtype(x: jax.Array) -> Any:
    """Returns the dtype of the parameters of a normalisation: float64 if x is, otherwise float32."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def like(array: jax.Array, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Returns the description of a result with the dtype of an array, and its shape or another one."""
    return jax.ShapeDtypeStruct(array.shape if shape is None else tuple(shape), array.dtype)


def _materialized(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent


def _not_differentiable(function: str, name: str) -> str:
    return (
        f"expected an array without gradient for {name}, got one with respect to which {function} is differentiated, "
        f"which the server does not compute; pass jax.lax.stop_gradient({name})"
    )
