"""The command line: the front door, and the commands of serving."""
