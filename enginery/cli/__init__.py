"""The command line: a module per command, named as the command."""
