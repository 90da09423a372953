"""The pipelines, their graph and their configs. `enginery` loads a pipeline file by its path."""
