"""The commands of the command line. Each imports what it needs when it runs, so that the others start fast."""
