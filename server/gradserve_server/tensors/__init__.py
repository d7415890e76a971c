"""Tensors on the server: how requests refer to them, how they are opened, stored and delivered.

`rpc/` decodes each tensor of a request to a reference (`references`): inline, stored, beside the message, in the
client's memory, on the client's GPU, or malformed. Only `opening` looks into references. For the length of a block it
holds the stored tensors, renews their leases, and hides those that the call releases; they come back if the call fails.
A call asks the opened tensors for what it needs where it needs it: permission to write, memory that outlasts the block,
copies on the device or the host.

`delivery` takes the request's wish before anything is computed: results inline, or kept under handles. Memory for
outputs is reserved before they are computed, and whatever is kept takes over that reservation. A call that fails after
it kept something leaves nothing behind.

`store` keeps tensors under leased handles, `residence` says in whose memory, `eviction` moves idle ones from the device
to the host, `transfers` carries them to and from a device while they arrive or leave, and `inflight` limits how much of
requests may be arriving at once.

Uploads go to pooled buffers, because a fresh 100 MB costs 24,000 page faults, which take longer than filling it. When a
call releases a tensor that nobody else uses, an accumulator takes over its buffer as the sum, and the sum, divided in
place, is the average. So with W workers, the server holds at most W uploads and the averages that it keeps.
"""
