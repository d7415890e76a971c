"""State directories: the files of resources that survive their server.

A `directory` has bytes in `segments` and metadata in a `database`, which finds out whether all files belong together.
`store` writes changes in groups, in a thread. On it stands `journal`: it writes the events of a resource before they
take effect, replays them after a restart, and replaces many of them by a snapshot of the state that they lead to.
Whatever was committed is there after a crash; docs/durability.md says what is committed when.
"""
