"""Register a bundle that passed its gate as a model version in MLflow; as the champion, where it is not worse.

Reads:   a Bundle, its Report and its Verdict, and the Dataset that they were measured on.
Writes:  a Promotion: manifest.json with the registered name, version, alias and comparison; audit.json.
Needs:   MLflow (MLFLOW_TRACKING_URI). Nothing is rebuilt: the digests that were measured are the ones registered.
         Only a champion that was measured on other data needs DALI, and TensorRT or OpenVINO: it is measured again.
"""
