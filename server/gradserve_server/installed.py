"""Whoever imports this first learns what to install, rather than which module is missing."""

from gradserve_server.extras import require

require("server")
