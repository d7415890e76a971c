"""The commands of the command line, one file each. What a command needs is imported when it runs."""
