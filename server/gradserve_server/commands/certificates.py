"""The command that makes certificates for a first deployment."""

from pathlib import Path

import click

from gradserve_server.commands.wording import tell

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Names under which a server is reached from its own machine, as by health checks."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("certificates"))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="a name or IP address under which clients reach the server, beside localhost, 127.0.0.1 and ::1; repeatable",
)
@click.option(
    "--client", "clients", multiple=True, metavar="NAME", help="a client that needs a certificate; repeatable"
)
@click.option("--no-server", is_flag=True, help="make certificates for clients only")
@click.option(
    "--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="how long the certificates are valid"
)
def certificates(folder: Path, hosts: tuple[str, ...], clients: tuple[str, ...], no_server: bool, days: int) -> None:
    """Make a private authority, and certificates for a server and its clients, in FOLDER.

    The authority, ca.pem and ca.key, is made once. Certificates that exist are replaced; servers and clients that use
    them notice. Keep ca.key to yourself: who has it can make certificates for anything.
    """
    from gradserve_server.security.authority import Authority, AuthorityError

    try:
        authority = Authority.in_folder(folder)
        if not no_server:
            names = tuple(dict.fromkeys((*hosts, *_THIS_MACHINE)))
            issued = authority.issue_server(names, days)
            tell(f"{issued.certificate}, {issued.key}: the server, {', '.join(names)}")
        for name in clients:
            issued = authority.issue_client(name, days)
            tell(f"{issued.certificate}, {issued.key}: the client {name}")
    except AuthorityError as error:
        raise click.ClickException(str(error)) from None
    tell(f"{folder / 'ca.pem'}: the authority, which both sides need")
