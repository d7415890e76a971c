"""Checks on import that the server's extra is installed, so that an error says how to install it."""

from gradserve_server.runtime.extras import require

require("server")
