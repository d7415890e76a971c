"""The quotas that everything on a server shares."""

from gradserve_server.config import LimitsConfig
from gradserve_server.security.shares import ShareRules
from gradserve_server.tensors.fair_quota import FairQuota
from gradserve_server.tensors.purpose_quota import PurposeQuota
from gradserve_server.tensors.quotas import Cost

_HANDLE_BYTES = 1024
"""The memory of a stored tensor or a kept forward without elements, measured."""
_LAYER_BYTES = 24 << 10
"""The memory of a layer without variables and tags."""


class ServerQuotas:
    """The quotas of a server.

    Attributes:
        rules: How much an identity or a container may take of them.
        memory: The bytes of tensors, on a GPU's host without those on the GPU.
        stored_memory: What of that stored tensors take.
        accumulator_memory: What of that accumulators take.
        layer_memory: What of that layers take.
        call_memory: What of that calls under way take.
        device_memory: The bytes of the memory of the device that ops run on; None if that is the host's.
        bookkeeping: The bytes of what is kept beside tensors.
        handles: Stored tensors, and forwards that layers keep.
        layers: The layers.
    """

    def __init__(self, limits: LimitsConfig, rules: ShareRules, device_bytes: int | None = None) -> None:
        """Takes the limits, how much of them an identity or a container may take, and what the device has.

        Args:
            limits: The limits.
            rules: How much an identity or a container may take.
            device_bytes: How much of its memory the device can spare; None if it has none of its own.
        """
        self.rules = rules
        self.device_memory = None
        if device_bytes is not None:
            self.device_memory = FairQuota(
                min(limits.max_device_bytes or device_bytes, device_bytes),
                "bytes of the device's memory (--max-device-bytes)",
                rules,
                of_identity=lambda own: own.max_device_bytes,
            )
        self.memory = FairQuota(
            limits.max_bytes,
            "bytes of tensor memory",
            rules,
            of_identity=lambda own: own.max_bytes,
            of_container=lambda own: own.max_bytes,
        )
        self.stored_memory = PurposeQuota(self.memory)
        self.accumulator_memory = PurposeQuota(self.memory)
        self.layer_memory = PurposeQuota(self.memory)
        self.call_memory = PurposeQuota(self.memory)
        self.bookkeeping = FairQuota(limits.bookkeeping_bytes, "bytes of bookkeeping", rules)
        self.handles = FairQuota(
            limits.max_handles,
            "tensor handles",
            rules,
            each=Cost(self.bookkeeping, _HANDLE_BYTES),
            of_identity=lambda own: own.max_handles,
        )
        self.layers = FairQuota(
            limits.max_layers,
            "layers",
            rules,
            each=Cost(self.bookkeeping, _LAYER_BYTES),
            of_container=lambda own: own.max_layers,
        )
