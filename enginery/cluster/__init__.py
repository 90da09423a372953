"""Running on a cluster: what the steps get there, the KFP server, and following a run."""
