"""How the steps chain: the pipelines, the `enginery` command line, and the built-in datasets."""
