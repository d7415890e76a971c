"""The model of one worker, in one process or on several ranks that train it together.

Of several ranks, the first one leads: it alone talks to the server. It announces what it is about to do with the model,
and the others do their part of that, as collectives need. So a worker counts once, whole or not at all, however many
ranks it has.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError

T = TypeVar("T")
Command: TypeAlias = tuple[str, Any]


class HostValues:
    """Tensors of a model whose values travel, and come back.

    Attributes:
        tensors: The tensors, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """`dtype` is that in which the tensors travel; None: their own."""
        self.tensors = tensors
        self._dtype = dtype
        self._pinned: dict[str, torch.Tensor] = {}

    def local(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Returns the present values in the memory of the host, where they stay until the next step or call."""
        found = {name: self._on_host(name, self._whole(self.tensors[name].detach())) for name in names}
        for device in {self.tensors[name].device for name in names}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return found

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces the values of some of the tensors, in place: optimizers keep their state."""
        with torch.no_grad():
            for name, value in values.items():
                tensor = self.tensors[name]
                tensor.copy_(value if tensor.dtype.is_floating_point else value.round())

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _on_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            pinned = self._pinned.get(name)
            if pinned is None:
                is_cuda = tensor.device.type == "cuda"
                pinned = self._pinned[name] = torch.empty_like(tensor, device="cpu", pin_memory=is_cuda)
            tensor = pinned.copy_(tensor, non_blocking=True)
        return tensor if self._dtype is None else tensor.to(self._dtype)


class Ranks:
    """The ranks that train one model together, as one of them sees them.

    Attributes:
        leads: Whether this rank talks to the server.
    """

    def __init__(self, group: Any) -> None:
        """Takes their process group."""
        self._group = group
        self._leader = dist.get_global_rank(group, 0) if group is not dist.group.WORLD else 0
        self.leads = dist.get_rank(group) == 0
        self._values: list[RankValues] = []

    def values(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> HostValues:
        """Returns tensors of the model; all ranks make the same ones, in the same order."""
        made = RankValues(self, len(self._values), tensors, dtype)
        self._values.append(made)
        return made

    def sum(self, number: int) -> int:
        """Returns the sum of the ranks' numbers."""
        numbers: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(numbers, number, group=self._group)
        return sum(numbers)

    def led(self, work: Callable[[], T]) -> T:
        """Lets the leader do some work with the values, and the others their part of it; returns its result everywhere.

        Raises:
            Exception: What the work raised, on all ranks.
        """
        if self.leads:
            try:
                result = work()
            except Exception as error:
                self.announce("failed", error)
                raise
            self.announce("done", result)
            return result
        while True:
            command, given = self.announce()
            if command == "failed":
                raise given
            if command == "done":
                finished: T = given
                return finished
            number, names = given
            self._values[number].follow(command, names)

    def announce(self, command: str = "", given: Any = None) -> Command:
        """Sends a command to the other ranks, or gets the leader's."""
        box: list[Any] = [(command, given)]
        dist.broadcast_object_list(box, src=self._leader, group=self._group)
        result: Command = box[0]
        return result

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Gives all ranks the leader's values of a tensor."""
        dist.broadcast(tensor, src=self._leader, group=self._group)


class RankValues(HostValues):
    """Tensors of a model on several ranks: whole ones on the leader, shards or copies on all."""

    def __init__(
        self, ranks: Ranks, number: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
    ) -> None:
        super().__init__(tensors, dtype)
        self._ranks = ranks
        self._number = number

    def local(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        self._ranks.announce("gather", (self._number, list(names)))
        return super().local(names)

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        if values:
            self._ranks.announce("scatter", (self._number, list(values)))
            self._scatter(values, values)

    def follow(self, command: str, names: Sequence[str]) -> None:
        """Does this rank's part of what the leader has announced."""
        if command == "scatter":
            self._scatter(names, {})
            return
        for name in names:
            self._whole(self.tensors[name].detach())

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        # One parameter at a time, so that no rank ever has more than that beside its shards.
        whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
        return whole

    def _scatter(self, names: Collection[str], values: Mapping[str, torch.Tensor]) -> None:
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad():
            for name in names:
                tensor: Any = self.tensors[name]
                if name in values:
                    value = values[name] if tensor.dtype.is_floating_point else values[name].round()
                    whole = value.to(device=tensor.device, dtype=tensor.dtype)
                else:
                    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                if is_sharded(tensor):
                    tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))
                else:
                    whole = whole.contiguous()
                    self._ranks.broadcast(whole)
                    tensor.copy_(whole)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns True for a DTensor, as FSDP2 and tensor parallelism make of parameters."""
    return hasattr(tensor, "placements")


def ranks_of(model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], group: Any) -> Ranks | None:
    """Returns the ranks that train a model together; None if this process does it alone.

    Args:
        model: The model.
        parameters: Its parameters.
        group: Their process group. None: that of a DistributedDataParallel, or of the mesh that parameters are sharded
            over.

    Raises:
        InvalidArgumentError: The mesh has several dimensions, so the group has to be given.
    """
    sharded: list[Any] = [each for each in parameters.values() if is_sharded(each)]
    if group is None:
        model = getattr(model, "_orig_mod", model)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            group = model.process_group
        elif sharded:
            mesh = sharded[0].device_mesh
            if mesh.ndim > 1:
                raise InvalidArgumentError(
                    "the model is sharded over a mesh of several dimensions: pass process_group, the group of all "
                    "ranks in it, such as torch.distributed.group.WORLD",
                    field="process_group",
                )
            group = mesh.get_group()
    elif not isinstance(group, dist.ProcessGroup):
        raise Argument("process_group").error("a process group", group)
    if group is None or (dist.get_world_size(group) == 1 and not sharded):
        return None
    return Ranks(group)
