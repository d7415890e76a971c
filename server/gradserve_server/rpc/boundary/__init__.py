"""The chain of interceptors around every call, whatever its transport, with statuses and messages.

An interceptor has one method, `around`: it takes the function that answers a method's calls, and returns one that does
the same with something around it. `chain` composes them once for each method, at the start, so a call costs only these
functions. In the middle is the servicer's method, which gets the request and a `Call`: the facts about the call.
`interceptors` has those of every server: they count and time calls, turn whatever is raised into a domain error, log
the server's own faults, admit calls until the server drains, check the caller's role and refuse malformed messages.

`status` is the one table from domain errors to statuses. `messages` counts the parts of long requests before they are
parsed, parses those with many parts in slices, and serializes long replies so, because no other thread runs while
protobuf does. Nothing here imports gRPC.

To add an interceptor, write a class in `interceptors`, its test in tests/rpc/boundary, and its line in `rpc.services`.
"""
