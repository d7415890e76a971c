"""`gradserve cluster resize`: changes the number of servers."""

import click

from gradserve_server.commands.cluster.ray_address import ray_address_option, ray_errors
from gradserve_server.commands.wording import tell
from gradserve_server.config.settings import Setting, make_config


@click.command()
@click.argument("name", required=False)
@click.option("--servers", type=click.IntRange(min=1), required=True, help="The number of servers after it.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that open rounds have to end, then servers to stop, then to serve.",
)
@click.option(
    "--drop-volatile", is_flag=True, help="Let accumulators of durability none end; otherwise they are an error."
)
@ray_address_option
def resize(name: str | None, servers: int, timeout: float, drop_volatile: bool, address: str | None) -> None:
    """Change the number of servers of the cluster NAME, between rounds; without NAME, of the only one.

    New rounds are held until no round is open; then the servers stop, accumulators that get another home move there,
    those that are sharded are divided anew, and all servers start. Clients have to connect again. If anything fails,
    the cluster goes on as before.
    """
    make_config({"cluster": Setting("x", "NAME"), "cluster_size": Setting(servers, "--servers")})
    with ray_errors():
        from gradserve_server.on_ray.cluster import command_on_ray
        from gradserve_server.on_ray.member import only_cluster
        from gradserve_server.on_ray.resizing import resize_cluster

        with command_on_ray(address):
            name = name or only_cluster()
            done = resize_cluster(name, servers, timeout, drop_volatile=drop_volatile)
    for move in done.moves:
        tell(f"{'/'.join(move.key)}: {move}")
    for lost in done.lost:
        tell(f"{lost}: lost, its durability is none")
    for index, each in enumerate(done.addresses):
        tell(f"server {index} at {each}")
    tell(f"{name}: {done.before} to {servers} servers; {len(done.moves)} accumulators moved, with the same digests")
