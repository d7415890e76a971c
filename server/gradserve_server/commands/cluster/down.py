"""`gradserve cluster down`: ends a cluster."""

import click

from gradserve_server.commands.cluster.ray_address import ray_address_option, ray_errors
from gradserve_server.commands.wording import tell


@click.command()
@click.argument("name", required=False)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that servers have to end in order; those that have not are killed.",
)
@ray_address_option
def down(name: str | None, timeout: float, address: str | None) -> None:
    """End the cluster NAME; without NAME, the only one.

    A Ray that was started by `gradserve cluster up` ends with its last cluster. State directories stay.
    """
    with ray_errors():
        from gradserve_server.on_ray.cluster import command_on_ray, stop_cluster
        from gradserve_server.on_ray.local_ray import stop_local_ray
        from gradserve_server.on_ray.member import only_cluster

        with command_on_ray(address):
            name = name or only_cluster()
            local_ray = stop_cluster(name, timeout)
        if local_ray is not None:
            stop_local_ray(local_ray)
    tell(f"{name} has ended" + (", and its Ray" if local_ray is not None else ""))
