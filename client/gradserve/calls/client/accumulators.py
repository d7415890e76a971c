"""The client's calls about accumulators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gradserve.calls.accumulators.components import Components
from gradserve.calls.accumulators.creation import AccumulatorOptions
from gradserve.calls.accumulators.models import GradientAccumulatorCalls
from gradserve.calls.accumulators.operations import (
    ConditionalAccumulatorCalls,
    SparseConditionalAccumulatorCalls,
)
from gradserve.calls.client.state import ClientState
from gradserve.calls.exchange import Operation
from gradserve.conversion.plain import as_flag, as_text
from gradserve.conversion.trees import Tree
from gradserve.public_names import complete_docstrings
from gradserve.results import AccumulatorInfo, DenseSpec, DTypeLike, Shape, SparseSpec
from gradserve_protocol.argument import Argument


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
        durability: str | None = None,
        device: str | None = None,
        agreement: Mapping[str, str] | None = None,
    ) -> Operation[ConditionalAccumulatorCalls]:
        """Creates an accumulator of dense gradients of one tensor, or finds the one with this shared name.

        Args:
            dtype: float16, bfloat16, float32 or float64: a name, or any library's dtype object.
            shape: The shape of every gradient. () is a scalar; None is an unknown dimension, or an unknown shape.
            shared_name: The name by which other clients find the accumulator, which then lives until it is deleted.
                None: it is private and deleted with this client: on `close`, or if the client dies or its network
                fails, after `client_lease` of `server_info().limits`, 60 seconds by default.
            name: The prefix of a private accumulator's name in lists.
            reduction_type: "MEAN" or "SUM" of a round's gradients.
            container: The namespace of the shared name. Empty: the default one.
            accumulate_dtype: The dtype of the running sum. None: float32 for 16-bit gradients, else `dtype`. A 16-bit
                dtype rounds at each addition, as TensorFlow does.
            deterministic: Whether to sum in the order of worker ids, so that the same gradients give the same bits in
                whatever order they arrive.
            keep_averages: The number of past rounds whose averages can be read.
            one_per_worker: Whether to count only the first gradient of each worker in a round. Otherwise every gradient
                counts, as in TensorFlow.
            refuse_non_finite: Whether to refuse gradients with infinities or NaN, with an InvalidArgumentError that
                locates the first one. Otherwise they are averaged like all others.
            idle_lease: Seconds without use after which the server deletes the accumulator. None: never. Calls on it by
                any client count as use, even while they wait; listing does not.
            durability: What survives a crash of a server with a state directory: "none"; "round": each round that has
                ended, from before anybody sees it; "gradient": each gradient, from before its call returns. None: what
                the server was started with.
            device: In whose memory sums and averages are, with the same bits: "cpu", or the device that ops run on
                (`server_info().device`), for dense components. "auto": that device, whatever it is. None: what the
                server was started with.
            agreement: Short texts by name on which all who create or find the accumulator must agree, such as
                {"num_required": "4"}: at most 64 of at most 1024 bytes. The server compares them, and does nothing
                else with them. None: none.

        Returns:
            The accumulator.

        Raises:
            InvalidArgumentError: An argument is not valid, or arguments do not go together.
            AlreadyExistsError: The name is taken by an accumulator with other properties; the message says which.
            ResourceExhaustedError: The server has reached its limit of accumulators.
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
            durability,
            device,
            agreement,
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
        durability: str | None = None,
        device: str | None = None,
        agreement: Mapping[str, str] | None = None,
    ) -> Operation[SparseConditionalAccumulatorCalls]:
        """Creates an accumulator of sparse gradients of one tensor, or finds the one with this shared name.

        Args:
            shape: The shape of the whole tensor, whose rows the gradients have. None is an unknown dimension, or an
                unknown shape.
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
            durability,
            device,
            agreement,
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
        durability: str | None = None,
        device: str | None = None,
        agreement: Mapping[str, str] | None = None,
        missing: Literal["error", "zeros"] = "error",
        sharded: bool | None = None,
        ends_when_lost: bool = False,
    ) -> Operation[GradientAccumulatorCalls]:
        """Creates an accumulator of the gradients of a whole model, or finds the one with this shared name.

        Args:
            components: The model's parameters, or anything with their dtypes and shapes: a dict by name, or a tree of
                dicts, lists, tuples and named tuples, like JAX's pytrees. A leaf is an array of any library, a handle,
                numbers in lists, a DenseSpec or a SparseSpec; its component is named by the path to it, such as
                "layers/0/w". None is not a component.
            accumulate_dtype: The dtype of the running sum. None: float32 for 16-bit gradients, else the component's
                dtype. A 16-bit dtype rounds at each addition, as TensorFlow does.
            one_per_worker: Whether to count only the first gradient of each worker in a round. Otherwise every gradient
                counts, as in TensorFlow. `push_pull` has its own argument for it.
            missing: What this object does with a gradient in which a component is missing or None. "error": raise an
                InvalidArgumentError. "zeros": send zeros in its place, which count in the mean.
            sharded: Whether to spread it over all servers of a client that has several, or whose aggregator has several
                upstream, each with some components or some of their rows. The shapes of dense components have to be
                known for that, and those of sparse ones but for the first size; the device has to be "cpu". Through an
                aggregator, it needs a shared name. None: if that is so, the device was not given or is "cpu", and the
                dense gradients have at least 1 MiB. False: it is on one server as a whole.
            ends_when_lost: Whether every call of this object raises LostError from the moment at which a restart of the
                server has lost the accumulator, even if nothing of this client's was in it; make it again with this
                method. For programs whose own state belongs to this very accumulator. False: one call raises LostError
                if this client knows of something that was lost, and later ones reach the one that was created again.
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
            durability,
            device,
            agreement,
            sharded,
            as_flag(ends_when_lost, Argument("ends_when_lost")),
        )
        wire = yield from self._accumulators.create(name, shared_name, Components.of_tree(components, missing), options)
        return GradientAccumulatorCalls(wire, self._timeout)

    def list_accumulators(self, container: str = "") -> Operation[list[AccumulatorInfo]]:
        """Describes all accumulators of a container, sorted by name.

        Args:
            container: The namespace. Empty: the default one.

        Returns:
            The descriptions. Each is a snapshot.
        """
        return self._accumulators.list_all(container)

    def delete_accumulator(self, name: str, container: str = "") -> Operation[bool]:
        """Deletes an accumulator by its name, for all clients. Calls that wait on it end with AbortedError.

        Args:
            name: The shared name, or the name in `list_accumulators`.
            container: The namespace of the name. Empty: the default one.

        Returns:
            Whether it existed.
        """
        return self._accumulators.delete(as_text(container, Argument("container")), as_text(name, Argument("name")))


complete_docstrings(
    AccumulatorsOfClient,
    {"sparse_conditional_accumulator": "conditional_accumulator", "gradient_accumulator": "conditional_accumulator"},
)
