"""State directories: what resources keep on disk, and how their changes become events.

A `journal` receives each event of a resource before it takes effect. A `directory` has bytes in `segments`, metadata in
a `database`, and the number of the newest commit; `opening` finds out whether these belong together, and `store` writes
changes in groups, in a thread. Whatever was committed is there after a crash; docs/durability.md says what is committed
when.
"""
