"""`gradserve token`: makes a bearer token."""

import json

import click


@click.command()
@click.argument("name", default="NAME")
def token(name: str) -> None:
    """Make a bearer token for the identity NAME; print it, and its lines for the access file of the server."""
    from gradserve_server.security.access_file import DIGEST_PREFIX
    from gradserve_server.security.credentials import digest_of, new_token

    made, key = new_token(), name if name.replace("-", "_").isidentifier() else json.dumps(name)
    lines = (
        "# For the client alone: GRADSERVE_TOKEN, or connect(..., token=)",
        made,
        "",
        "# For the server's access file",
        f"[identities.{key}]",
        f'tokens = ["{DIGEST_PREFIX}{digest_of(made).hex()}"]',
        'roles = { "*" = "worker" }',
    )
    click.echo("\n".join(lines))
