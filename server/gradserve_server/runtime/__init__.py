"""The process that a server runs in: its event loop, tasks, clocks, signals and files, and the machine below it."""
