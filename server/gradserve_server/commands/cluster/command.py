"""The group `gradserve cluster`."""

import click

from gradserve_server.commands.cluster.down import down
from gradserve_server.commands.cluster.resize import resize
from gradserve_server.commands.cluster.status import status
from gradserve_server.commands.cluster.up import up


@click.group()
def cluster() -> None:
    """Run several servers as a cluster on Ray, which starts them again when they end.

    Needs the extra ray.
    """


for each in (down, resize, status, up):
    cluster.add_command(each)
