"""The calls of clients that concern accumulators."""

from __future__ import annotations

from typing import Literal

from numpy.typing import DTypeLike

from gradserve.calls.accumulator_wire import AccumulatorOptions, list_accumulators
from gradserve.calls.accumulator_wire import delete as delete_accumulator
from gradserve.calls.accumulators import (
    ConditionalAccumulatorCalls,
    GradientAccumulatorCalls,
    SparseConditionalAccumulatorCalls,
)
from gradserve.calls.client.state import ClientState
from gradserve.calls.components import Components
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
        """Creates an accumulator of dense gradients, or finds the one of this shared name.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            shape: Of every gradient; None as a dimension, or instead of all, where unknown. () is a scalar.
            shared_name: Under which other clients find it, until somebody deletes it. None: it is this client's own.
                The server deletes it when this client is closed; when its process has ended in another way, or its
                network is gone, somewhat later (after `client_lease` of `server_info().limits`, 60 s).
            name: How one without a shared name is called in lists.
            reduction_type: "MEAN" or "SUM".
            container: Namespace of the shared name; empty for the default one.
            accumulate_dtype: Type of the running sum. None: float32 for 16-bit gradients, else `dtype`. `dtype`
                itself rounds at each addition, as TensorFlow does.
            deterministic: Add up in the order of workers: the same bits, whatever order gradients come in.
            keep_averages: For how many past rounds the average can be read.
            one_per_worker: Count only the first gradient of each worker in a round, not, as TensorFlow does, every one.
                (`push_pull` does so anyway.)
            refuse_non_finite: Refuse gradients with infinite values or NaN, with an InvalidArgumentError that says
                where the first one is; otherwise they are averaged as all others.
            idle_lease: Seconds without use after which the server deletes it; None: never. Every call is a use that
                concerns this accumulator, of any client, also while it waits; lists are not.

        Raises:
            InvalidArgumentError: One of them cannot be.
            AlreadyExistsError: The name is taken by one with other properties; says which.
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
        """Creates an accumulator of sparse gradients, or finds the one of this shared name.

        `shape` is that of the whole tensor. For all else see `conditional_accumulator`.
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
        """Creates an accumulator of whole models' gradients, or finds the one of this shared name.

        Args:
            components: The parameters of the model, or what has their dtypes and shapes: a dict by name, or a tree of
                dicts, lists, tuples and named tuples, as JAX's pytrees. A leaf is an array of any library, a handle,
                numbers in lists, a DenseSpec or a SparseSpec; its way names its component, such as "layers/0/w". None
                has no component.
            shared_name: See `conditional_accumulator`, as for all but the last.
            name: How one without a shared name is called in lists.
            reduction_type: "MEAN" or "SUM".
            container: Namespace of the shared name.
            accumulate_dtype: Type of the running sums.
            deterministic: Add up in the order of workers.
            keep_averages: For how many past rounds the average can be read.
            one_per_worker: Count only the first gradient of each worker in a round.
            refuse_non_finite: Refuse gradients with NaN or an infinity.
            idle_lease: Seconds without use after which the server deletes it; None: never.
            missing: What becomes of a gradient that this object is given without a component, or with None for it:
                "error", or "zeros", which are sent in its place, and count in the mean as others do.

        Raises:
            InvalidArgumentError: One of them cannot be.
            AlreadyExistsError: The name is taken by one with other properties; says which.
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
        """Describes all accumulators of a container."""
        return list_accumulators(container)

    def delete_accumulator(self, name: str, container: str = "") -> Operation[bool]:
        """Deletes an accumulator by its name, for all clients: calls that wait on it end with AbortedError.

        Args:
            name: The shared name, or the name that `list_accumulators` has.
            container: Its namespace; empty for the default one.

        Returns:
            False when there was none.
        """
        ref = accumulator_pb2.AccumulatorRef(
            container=as_text(container, Argument("container")), name=as_text(name, Argument("name"))
        )
        deleted = yield from delete_accumulator(ref)
        self._private.deleted(ref.name)
        return deleted
