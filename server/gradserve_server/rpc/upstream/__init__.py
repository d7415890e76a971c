"""The accumulators of an aggregator: those of the server upstream, with gradients of several workers in one.

The `service` takes the place of the accumulators' servicer and keeps no state that matters: requests go upstream with
the ids that workers gave them, and a call is answered when the server upstream has answered it. A gradient may outlive
its call, so it is never read in its caller's memory. `forwarding` sends the sum of a batch with the id, weight and
worker of each gradient in it, over a `link`, which is the transport of the asyncio client. The server upstream
remembers each of these ids and refuses a sum if it has seen one of them; then the gradients go one by one. So each
counts once, whatever dies. With a cluster upstream, `shards` stages the sum in parts. Accumulators that belong to one
client are served by the usual servicer.
"""
