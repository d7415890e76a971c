"""`gradserve certificates` and `gradserve token`: create credentials for servers and clients."""

import json
from pathlib import Path

import click

from gradserve_server.commands.wording import tell


@click.command()
@click.argument("name", default="NAME")
@click.option("--role", default="worker", show_default=True, help="What it may do: worker, chief or admin.")
@click.option("--container", default="*", show_default=True, help='Where: a container, or "*" for all of them.')
@click.option(
    "--access",
    type=click.Path(dir_okay=False, path_type=Path),
    help="An access file to which the identity is added, or which is made. Only the token is printed then.",
)
def token(name: str, role: str, container: str, access: Path | None) -> None:
    """Make a bearer token for the identity NAME.

    Prints the token, and its lines for the access file of the server. With --access, adds these to the file and prints
    the token alone: TOKEN=$(gradserve token trainer --role chief --access access.toml). A server that uses the file
    takes the change over within a second or two.
    """
    from gradserve_server.commands.wording import tell
    from gradserve_server.security.access_file import AccessFileError, add_identity, check_identity
    from gradserve_server.security.identity import new_token

    made = new_token()
    entry = identity_entry(name, made, role, container)
    try:
        if access is None:
            check_identity(entry)
            return tell(
                *("# For the client alone: GRADSERVE_TOKEN, or connect(..., token=)", made, ""),
                *("# For the server's access file", *entry.splitlines()),
            )
        add_identity(access, entry)
    except AccessFileError as error:
        raise click.ClickException(str(error)) from None
    return tell(made)


def identity_entry(name: str, token: str, role: str, container: str) -> str:
    """Returns the lines of an access file for an identity that shows a token; the file is to have only its digest."""
    from gradserve_server.security.access_file import DIGEST_PREFIX
    from gradserve_server.security.identity import digest_of

    lines = (
        f"[identities.{_key(name)}]",
        f'tokens = ["{DIGEST_PREFIX}{digest_of(token).hex()}"]',
        f"roles = {{ {_key(container) if container != '*' else json.dumps(container)} = {json.dumps(role)} }}",
    )
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.replace("-", "_").isidentifier() and name.isascii() else json.dumps(name)


THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""The names by which a server is reached from its own machine, for example by health checks."""


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
            names = tuple(dict.fromkeys((*hosts, *THIS_MACHINE)))
            issued = authority.issue_server(names, days)
            tell(f"{issued.certificate}, {issued.key}: the server, {', '.join(names)}")
        for name in clients:
            issued = authority.issue_client(name, days)
            tell(f"{issued.certificate}, {issued.key}: the client {name}")
    except AuthorityError as error:
        raise click.ClickException(str(error)) from None
    tell(f"{folder / 'ca.pem'}: the authority, which both sides need")
