"""The calls of clients that concern accumulators."""

from __future__ import annotations

from typing import Literal

from gradserve.array_like import DTypeLike
from gradserve.calls.accumulators.components import Components
from gradserve.calls.accumulators.operations import (
    ConditionalAccumulatorCalls,
    GradientAccumulatorCalls,
    SparseConditionalAccumulatorCalls,
)
from gradserve.calls.accumulators.wire import AccumulatorOptions, list_accumulators
from gradserve.calls.accumulators.wire import delete as delete_accumulator
from gradserve.calls.client.state import ClientState
from gradserve.calls.exchange import Operation
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_text
from gradserve.conversion.trees import Tree
from gradserve.results import AccumulatorInfo, DenseSpec, Shape, SparseSpec
from gradserve.v1 import accumulator_pb2


class AccumulatorsOfClient(ClientState):
    """Makes, lists and deletes accumulators."""

    def conditional_accumulator(
        self,
        dtype: DTypeLike,
        shape: Shape | None = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        container: str = "",
        accumulate_dtype: DTypeLike | None = None,
        deterministic: bool = False,
        keep_averages: int = 1,
        one_per_worker: bool = False,
        refuse_non_finite: bool = False,
        idle_lease: float | None = None,
    ) -> Operation[ConditionalAccumulatorCalls]:
        """Creates an accumulator of dense gradients of one tensor, or finds the one of this shared name.

        Args:
            dtype: float16, bfloat16, float32 or float64, by any name or object that a library has for it.
            shape: The shape of every gradient. () is a scalar; None, as a dimension or instead of all, is unknown.
            shared_name: The name by which other clients find the accumulator, until somebody deletes it. None: it is
                this client's own, and the server deletes it when the client is closed. If the client's process dies or
                its network fails, that takes a while longer: `client_lease` of `server_info().limits`, 60 seconds.
            name: What lists call an accumulator without a shared name.
            reduction_type: "MEAN" or "SUM" of the gradients of a round.
            container: The namespace of the shared name. Empty: the default one.
            accumulate_dtype: The dtype of the running sum. None: float32 for 16-bit gradients, else `dtype`. A 16-bit
                dtype rounds at each addition, as TensorFlow does.
            deterministic: Add up in the order of worker ids: the same gradients give the same bits, in whatever order
                they come.
            keep_averages: For how many past rounds the average can be read.
            one_per_worker: Count only the first gradient of each worker in a round. Otherwise every gradient counts, as
                in TensorFlow.
            refuse_non_finite: Refuse gradients with infinite values or NaN, with an InvalidArgumentError that says
                where the first one is. Otherwise they are averaged as all others.
            idle_lease: Seconds without use after which the server deletes the accumulator. None: never. Every call that
                concerns it is a use, of any client, also while it waits; lists are not.

        Returns:
            The accumulator.

        Raises:
            InvalidArgumentError: An argument has a value that it cannot have, or arguments do not go together.
            AlreadyExistsError: The name is taken by an accumulator with other properties; says which.
            ResourceExhaustedError: The server has as many accumulators as it may have.
        """
        options = AccumulatorOptions(
            reduction_type,
            container,
            accumulate_dtype,
            deterministic,
            keep_averages,
            one_per_worker,
            refuse_non_finite,
            idle_lease,
        )
        wire = yield from self._accumulators.create(
            name, shared_name, Components.of_one_tensor(DenseSpec(dtype, shape)), options
        )
        return ConditionalAccumulatorCalls(wire, self._timeout)

    def sparse_conditional_accumulator(
        self,
        dtype: DTypeLike,
        shape: Shape | None = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        container: str = "",
        accumulate_dtype: DTypeLike | None = None,
        deterministic: bool = False,
        keep_averages: int = 1,
        one_per_worker: bool = False,
        refuse_non_finite: bool = False,
        idle_lease: float | None = None,
    ) -> Operation[SparseConditionalAccumulatorCalls]:
        """Creates an accumulator of sparse gradients of one tensor, or finds the one of this shared name.

        Args:
            dtype: float16, bfloat16, float32 or float64, by any name or object that a library has for it.
            shape: The shape of the whole tensor, whose rows the gradients have. None, as a dimension or instead of all,
                is unknown.
            shared_name: The name by which other clients find the accumulator, until somebody deletes it. None: it is
                this client's own, and the server deletes it when the client is closed. If the client's process dies or
                its network fails, that takes a while longer: `client_lease` of `server_info().limits`, 60 seconds.
            name: What lists call an accumulator without a shared name.
            reduction_type: "MEAN" or "SUM" of the gradients of a round.
            container: The namespace of the shared name. Empty: the default one.
            accumulate_dtype: The dtype of the running sum. None: float32 for 16-bit gradients, else `dtype`. A 16-bit
                dtype rounds at each addition, as TensorFlow does.
            deterministic: Add up in the order of worker ids: the same gradients give the same bits, in whatever order
                they come.
            keep_averages: For how many past rounds the average can be read.
            one_per_worker: Count only the first gradient of each worker in a round. Otherwise every gradient counts, as
                in TensorFlow.
            refuse_non_finite: Refuse gradients with infinite values or NaN, with an InvalidArgumentError that says
                where the first one is. Otherwise they are averaged as all others.
            idle_lease: Seconds without use after which the server deletes the accumulator. None: never. Every call that
                concerns it is a use, of any client, also while it waits; lists are not.

        Returns:
            The accumulator.

        Raises:
            InvalidArgumentError: An argument has a value that it cannot have, or arguments do not go together.
            AlreadyExistsError: The name is taken by an accumulator with other properties; says which.
            ResourceExhaustedError: The server has as many accumulators as it may have.
        """
        options = AccumulatorOptions(
            reduction_type,
            container,
            accumulate_dtype,
            deterministic,
            keep_averages,
            one_per_worker,
            refuse_non_finite,
            idle_lease,
        )
        wire = yield from self._accumulators.create(
            name, shared_name, Components.of_one_tensor(SparseSpec(dtype, shape)), options
        )
        return SparseConditionalAccumulatorCalls(wire, self._timeout)

    def gradient_accumulator(
        self,
        components: Tree,
        shared_name: str | None = None,
        name: str = "gradient_accumulator",
        reduction_type: str = "MEAN",
        *,
        container: str = "",
        accumulate_dtype: DTypeLike | None = None,
        deterministic: bool = False,
        keep_averages: int = 1,
        one_per_worker: bool = False,
        refuse_non_finite: bool = False,
        idle_lease: float | None = None,
        missing: Literal["error", "zeros"] = "error",
    ) -> Operation[GradientAccumulatorCalls]:
        """Creates an accumulator of the gradients of a whole model, or finds the one of this shared name.

        Args:
            components: The parameters of the model, or what has their dtypes and shapes: a dict by name, or a tree of
                dicts, lists, tuples and named tuples, as JAX's pytrees. A leaf is an array of any library, a handle,
                numbers in lists, a DenseSpec or a SparseSpec; the way to it is the name of its component, such as
                "layers/0/w". None is no component.
            shared_name: The name by which other clients find the accumulator, until somebody deletes it. None: it is
                this client's own, and the server deletes it when the client is closed. If the client's process dies or
                its network fails, that takes a while longer: `client_lease` of `server_info().limits`, 60 seconds.
            name: What lists call an accumulator without a shared name.
            reduction_type: "MEAN" or "SUM" of the gradients of a round.
            container: The namespace of the shared name. Empty: the default one.
            accumulate_dtype: The dtype of the running sum. None: float32 for 16-bit gradients, else that of the
                component. A 16-bit dtype rounds at each addition, as TensorFlow does.
            deterministic: Add up in the order of worker ids: the same gradients give the same bits, in whatever order
                they come.
            keep_averages: For how many past rounds the average can be read.
            one_per_worker: Count only the first gradient of each worker in a round. Otherwise every gradient counts, as
                in TensorFlow; `push_pull` decides for itself.
            refuse_non_finite: Refuse gradients with infinite values or NaN, with an InvalidArgumentError that says
                where the first one is. Otherwise they are averaged as all others.
            idle_lease: Seconds without use after which the server deletes the accumulator. None: never. Every call that
                concerns it is a use, of any client, also while it waits; lists are not.
            missing: What a gradient that comes without a component, or with None for it, means to this object. "error":
                an InvalidArgumentError. "zeros": zeros are sent in its place, and count in the mean as others do.

        Returns:
            The accumulator.

        Raises:
            InvalidArgumentError: An argument has a value that it cannot have, or arguments do not go together.
            AlreadyExistsError: The name is taken by an accumulator with other properties; says which.
            ResourceExhaustedError: The server has as many accumulators as it may have.
        """
        options = AccumulatorOptions(
            reduction_type,
            container,
            accumulate_dtype,
            deterministic,
            keep_averages,
            one_per_worker,
            refuse_non_finite,
            idle_lease,
        )
        wire = yield from self._accumulators.create(name, shared_name, Components.of_tree(components, missing), options)
        return GradientAccumulatorCalls(wire, self._timeout)

    def list_accumulators(self, container: str = "") -> Operation[list[AccumulatorInfo]]:
        """Describes all accumulators of a container, by name.

        Args:
            container: The namespace. Empty: the default one.

        Returns:
            The descriptions, each of its moment.
        """
        return list_accumulators(container)

    def delete_accumulator(self, name: str, container: str = "") -> Operation[bool]:
        """Deletes an accumulator by its name, for all clients. Calls that wait on it end with AbortedError.

        Args:
            name: The shared name, or the name that `list_accumulators` has.
            container: The namespace of the name. Empty: the default one.

        Returns:
            Whether there was one.
        """
        ref = accumulator_pb2.AccumulatorRef(
            container=as_text(container, Argument("container")), name=as_text(name, Argument("name"))
        )
        deleted = yield from delete_accumulator(ref)
        self._private.deleted(ref.name)
        return deleted
