"""tf.contrib.layers.batch_norm, with its variables on the server.

A layer consists of variables and three stateless ops that use them: forward, backward and update. `spec` checks them
and `passes` computes them with the kernels of FusedBatchNorm and of the activations, so the same runner runs them on
the same device. `config` has the arguments, and decides which of TensorFlow's implementations they select.

`layer` lives on the event loop. Its variables are one immutable value that is replaced as a whole: a forward computes
with the value it found, whatever is set in between. Only calls that change variables wait, first come, first served. A
change is first computed, which can fail; then it is decided, the journal takes the event (`events`), and `state`
applies it, which cannot fail. Events carry values, not how they were computed, so replaying them gives the same bits on
any device.

`forwards` keeps what backwards and delayed updates need, under leases and within the budgets, and remembers which of
the latest forwards were counted. Leases start again when events are replayed. `journal` writes
the events of a durable layer to a state directory, values apart, and `restoring` reads them after a restart; `records`
has their form there.
"""
