"""Runs the servers of a cluster on Ray. Needs the extra `ray`.

An actor per server (`member`) supervises `gradserve serve` in a process of its own (`server_process`); one more actor
(`directory`) knows where all of them are. `cluster` starts, shows and ends them.
"""
