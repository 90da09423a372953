"""Run a pipeline file on this machine, and what its runs leave."""
