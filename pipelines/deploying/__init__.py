"""Which model version and which images an environment runs, as values in git that Argo CD or Flux follow."""
