"""Runs the servers of a cluster on Ray, for the commands of `gradserve cluster`. Needs the extra `ray`.

An actor per server (`member`) supervises `gradserve serve` in a process of its own (`supervision`); one more actor
(`directory`) knows where all of them are. `cluster` starts, shows and ends them. `resizing` changes their number, for
which `states` moves accumulators between the servers' state directories.
"""
