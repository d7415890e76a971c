"""`gradserve token`: makes a bearer token."""

import json
from pathlib import Path

import click


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
    from gradserve_server.security.access_file import DIGEST_PREFIX, AccessFileError, add_identity, check_identity
    from gradserve_server.security.identity import digest_of, new_token

    made = new_token()
    lines = (
        f"[identities.{_key(name)}]",
        f'tokens = ["{DIGEST_PREFIX}{digest_of(made).hex()}"]',
        f"roles = {{ {_key(container) if container != '*' else json.dumps(container)} = {json.dumps(role)} }}",
    )
    entry = "\n".join(lines) + "\n"
    try:
        if access is None:
            check_identity(entry)
            return tell(
                *("# For the client alone: GRADSERVE_TOKEN, or connect(..., token=)", made, ""),
                *("# For the server's access file", *lines),
            )
        add_identity(access, entry)
    except AccessFileError as error:
        raise click.ClickException(str(error)) from None
    return tell(made)


def _key(name: str) -> str:
    return name if name.replace("-", "_").isidentifier() and name.isascii() else json.dumps(name)
