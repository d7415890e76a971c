"""Carries calls over a server's sockets; docs/sockets.md specifies them.

Everything but the system calls exists once for both faces: `carrier` makes a call on an idle connection or opens
another one (`connection`, `secure`), `choice` decides whether to try (after a failure again after 30 s, then after
twice as long, up to 5 minutes), and `conversation` has the frames as `steps` that send or receive, which `blocking`
and `aio` carry out. `payloads` says where tensors are: after the message, or on Unix sockets in regions
(`region_payloads`, `gpu_regions`).

One connection carries one call; beyond 32 calls at once, the rest take gRPC. A call whose socket broke ends with
UnavailableError, and its next attempt takes gRPC. If a connection ends before the server has answered a call that lent
regions, they become private to the process, and the server goes on reading what was sent.
"""
