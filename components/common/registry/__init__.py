"""MLflow: tracking, the model registry, its audit log, and who vouches for a model."""
