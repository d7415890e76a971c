"""The process that a server runs in: event loop, tasks, clocks, files, and what the machine has."""
