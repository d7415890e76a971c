"""The gradserve server: gradient ops and conditional accumulators over gRPC.

Needs the extra `server` of the distribution; a plain install has what the client needs.
"""

from gradserve_server.extras import require

require("server")
