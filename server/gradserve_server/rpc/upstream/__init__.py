"""The accumulators and parameters of an aggregator: those of the server upstream, with gradients of several in one.

`service` and `parameters` take the places of the servicers and keep no state that matters: requests go upstream with
the ids that workers gave them, and a call is answered when the server upstream has answered it. `aggregated` has what
is known of each resource; `versions` fetches those of parameters once for all workers here.

`forwarding` opens the gradients and updates of calls. One may outlive its call, so it is never read in its caller's
memory. It sends the sum of a batch with the id, weight and worker of each gradient in it, over a `link`, which is the
transport of the asyncio client. The server upstream remembers each of these ids and refuses a sum if it has seen one of
them; then the gradients go one by one. So each counts once, whatever dies. With a cluster upstream, `shards` stages the
sum of a sharded accumulator in parts, and `parameter_shards` that of parameters. Resources of one client alone are
served by the usual servicers.
"""
