"""The servers of a cluster on Ray. Imports Ray only to look one up."""

import re

from gradserve.errors import InvalidArgumentError

_NAME = re.compile(r"([A-Za-z0-9._-]{1,63})/?")


def servers_on_ray(cluster: str, timeout: float) -> list[str]:
    """Returns the addresses of the servers of a cluster that `gradserve cluster up` has started, in their order.

    Args:
        cluster: The name of the cluster.
        timeout: Seconds to wait until all of its servers are up; math.inf for no limit.

    Raises:
        InvalidArgumentError: It is no name of a cluster, or Ray is not installed.
        NotFoundError: There is no cluster of this name.
        UnavailableError: There is no Ray, or it refuses this process.
        DeadlineExceededError: Not all servers were up in time.
    """
    name = _NAME.fullmatch(cluster)
    if name is None:
        raise InvalidArgumentError(
            f"expected gradserve+ray://NAME with a name of 1 to 63 letters, digits, or ._-, got "
            f"{f'gradserve+ray://{cluster}'!r}",
            field="address",
        )
    try:
        from gradserve.discovery.ray_directory import addresses_on_ray
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise InvalidArgumentError(
            "address: gradserve+ray:// needs Ray; install it in a checkout of gradserve with: pip install '.[ray]'",
            field="address",
        ) from None
    return addresses_on_ray(name[1], timeout)
