"""The quotas that everything on a server shares."""

from gradserve_server.config import LimitsConfig
from gradserve_server.security.shares import ShareRules
from gradserve_server.tensors.fair_quota import FairQuota
from gradserve_server.tensors.quotas import Cost

_HANDLE_BYTES = 1024
"""The memory of a stored tensor or a kept forward without elements, measured."""
_LAYER_BYTES = 24 << 10
"""The memory of a layer without variables and tags."""


class ServerQuotas:
    """The quotas of a server.

    Attributes:
        rules: How much an identity or a container may take of them.
        memory: The bytes of tensors.
        bookkeeping: The bytes of what is kept beside tensors.
        handles: Stored tensors, and forwards that layers keep.
        layers: The layers.
    """

    def __init__(self, limits: LimitsConfig, rules: ShareRules) -> None:
        """Takes the limits, and how much of them an identity or a container may take."""
        self.rules = rules
        self.memory = FairQuota(
            limits.max_bytes,
            "bytes of tensor memory",
            rules,
            of_identity=lambda own: own.max_bytes,
            of_container=lambda own: own.max_bytes,
        )
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
