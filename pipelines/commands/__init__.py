"""The verbs of the `enginery` command line, one module each."""
