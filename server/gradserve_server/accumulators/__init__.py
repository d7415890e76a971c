"""Conditional accumulators: many workers' gradients, averaged in rounds.

`accumulator` answers calls, each once however often it is sent, and lets them wait; `changes` makes the changes of its
rounds one after the other. Each decision has a class of its own:

* `rounds` decides what is stale, which contributions form a round, and which step the round leads to. It has no
  arithmetic, no waiting and no clock.
* `ledger` remembers answers (`identity`), so a call counts once. It changes only by its events, and the same events
  give the same ledger; the `journal` of a durable accumulator writes each event before it takes effect, as a record of
  `records`.
* `waits` has the strict queue of takers; `averages` has the averages that are kept, and their readers.
* `sums` checks gradients and adds them up. Whatever can fail comes before whatever changes state.
* `places` says where sums and averages are, in the memory of the host or of the ops' device, and what computes there.
* `incoming` opens a gradient when its turn has come; `spec` has the fixed properties of an accumulator.
* `sharding` has one server's shard of an accumulator of a cluster, `durable` restores and moves accumulators.

An accumulator lives on the event loop. Whatever changes a round holds its lock, which is first come, first served, even
while a thread does the arithmetic. Takers are served before the lock is released. A change that has to wait goes on in
a task of the accumulator, so a caller that leaves cannot leave it half done; most changes of small gradients never wait
and take no task. Clock, ids, threads, memory and the opening of gradients are passed in: the tests run all this without
sockets, threads or time.

The dense components of a gradient are one piece of work, cut into chunks of equal size for all cores. A kernel computes
several operations in one pass over memory and rounds like NumPy, which takes its place until it is compiled: a sum has
the same bits either way, and on any number of threads. The dense part of an addition waits until the lock is about to
be released: if it ends a round that somebody waits for, it is one pass with the division.

Rounds, ledger, events, sums and places know no accumulator, so other resources that work in rounds can use
them.
"""
