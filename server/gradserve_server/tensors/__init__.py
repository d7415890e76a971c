"""Tensors on the server: how they come with requests, and how they are stored and delivered.

`incoming` has the tensors of a request. `rpc/` decodes them once, to `IncomingTensors`; each is an `IncomingTensor` in
its way of travelling: inline, stored, beside the message, in the client's memory, on the client's GPU, or malformed. A
`TensorOpener` opens all of them at once, for the length of a block: it holds the stored ones, renews their leases, and
hides those that the call releases, which come back if the call fails. An open tensor has an array, or a fault that is
raised when somebody needs the tensor. A call asks for what it needs: tensors on the host, permission to write, memory
that outlasts the block. Very many tensors, and long copies, take threads or several turns of the event loop; only
`TensorOpener` and `TensorStore.use` decide about that.

To add a way to travel, such as a codec, write a subclass of `IncomingTensor`, whose `settle` finds the array, and make
it in `rpc/tensors/messages.decode_tensors`. `payload` is the memory beside a message, in which some tensors are: who
uses it, whether it has arrived, and whether its client still lends it. It limits how much may be arriving at once.

`rpc/tensors/messages` takes the request's wish before anything is computed: results inline, or kept under handles.
Memory for outputs is reserved before they are computed, and whatever is kept takes over that reservation. A call that
fails after it kept something leaves nothing behind.

`store` keeps tensors under leased handles, `held` has them as calls use them, in any memory, `eviction` moves idle
ones from the device to the host, and `transfers` carries them to and from a device while they arrive or leave.

Uploads go to pooled buffers, because a fresh 100 MB costs 24,000 page faults, which take longer than filling it. When a
call releases a tensor that nobody else uses, an accumulator takes over its buffer as the sum, and the sum, divided in
place, is the average. So with W workers, the server holds at most W uploads and the averages that it keeps.
"""
