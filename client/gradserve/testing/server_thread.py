"""A server in a thread of this process, with faults by name."""

import difflib
from typing import Any, Self

from pydantic import ValidationError

from gradserve.testing.server_faults import Faults
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.testing import LocalServer


class ServerThread:
    """Runs a real server in a thread of this process, on a free port, until the end of the block.

    with ServerThread(max_bytes="64MiB") as server, gradserve.connect(server.address) as client:
        server.faults.fail_at("worker-1", step=3)

    Attributes:
        faults: The faults of this server; none until some are planted.
    """

    def __init__(self, **settings: Any) -> None:
        """Makes a server, which starts with the block.

        Args:
            **settings: The settings of `gradserve serve`, by their names in the TOML file: `max_bytes="64MiB"`,
                `state_dir=tmp_path`. Kernels of ops are loaded when the first op is computed, unless `warm_up=True`.
                There is no HTTP port, unless `http_listen="auto"`.

        Raises:
            InvalidArgumentError: There is no such setting, or its value is not valid.
        """
        self.faults = Faults()
        config = _configuration({"warm_up": False, "http_listen": "off", **settings})
        self._local = LocalServer(config, Parts(interceptors=(self.faults,)))

    @property
    def address(self) -> str:
        """Where it listens: "127.0.0.1:PORT"."""
        return self._local.address

    def __enter__(self) -> Self:
        self._local.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._local.__exit__(*exception)


def _configuration(settings: dict[str, Any]) -> ServerConfig:
    sections = {
        name: section
        for section, concern in ServerConfig.model_fields.items()
        if concern.annotation is not None
        for name in concern.annotation.model_fields
        if name not in ("listen", "address_file")  # it listens on a free port
    }
    nested: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in sections:
            close = difflib.get_close_matches(name, sections, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidArgumentError(f"expected settings of `gradserve serve`, got {name!r}{hint}")
        nested.setdefault(sections[name], {})[name] = str(value) if name.endswith("_dir") else value
    try:
        return ServerConfig.model_validate(nested)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgumentError(f"{first['loc'][-1]}: {first['msg']}, got {first['input']!r}") from None
