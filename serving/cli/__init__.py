"""The command line: the `onesweep` command and its serving commands."""
