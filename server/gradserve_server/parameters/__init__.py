"""Parameters that the server holds: variables in versions, which an optimizer moves by the updates of each round.

Parameters are an accumulator whose rounds end by themselves, and whose averages go through an optimizer: the versions.
Rounds, ledger, queue, sums, history, journal and delivery are those of `accumulators`; here is what differs, each with
its own module.

* `parameters` answers calls; `changes` changes rules and values; `registry` creates, finds, forks and deletes; `spec`
  has the properties, and the rules that may change.
* `closing` decides when a round ends, by `round_rules`. It reads no clock. `queue` asks it after each change, and at
  the time that it names; it also lets one of many clients create at a time.
* `ledger` decides which updates count, with which weight (`staleness`), and remembers it all as events.
* `update_sum` adds updates up or holds them, `unpacking` adds packed ones; `reductions` make one of them. `variables`
  has the masters and the state of the optimizer, and makes the next version; `optimizers` has the equations, fused with
  the mean.
* `versions` keeps versions, and packs them for readers; `record` has what each round was made of, in a chain of hashes.
* `journal` writes all that, and `restoring` reads it.
* `sharding` has followers: of parameters on several servers, all but the home follow its rounds.

To add an optimizer: `optimizers`. A rule for the end of a round: `round_rules` and `closing`. A way to make one update
of many: `reductions`. Each has its message in the protos and its value in the client.
"""
