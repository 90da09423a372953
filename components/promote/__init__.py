"""Register a bundle that passed its gate as a model version in MLflow, with an alias.

Reads:   a Bundle, its Report and its Verdict.
Writes:  a Promotion: manifest.json with the registered name, version and alias.
Needs:   MLflow (MLFLOW_TRACKING_URI). Nothing is rebuilt: the digests that were measured are the ones registered.
"""
