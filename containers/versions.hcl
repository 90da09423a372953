# The versions of every image. One NGC release for all; containers/check_versions.py compares what is said here with the
# Dockerfiles, the documents and, where an engine can reach them, the images themselves.

variable "NGC_RELEASE" { default = "26.08" }

# Digests pin what the tags name: "sha256:" and 64 hexadecimal digits. Where one is empty the tag alone counts, and a
# release is refused. `containers/pin` writes them. These were read in public records of November 2026, no registry was
# asked: of PyTorch and Triton the manifests of linux/amd64, of Python the index of all platforms (docs/containers.md).
variable "PYTORCH_DIGEST" { default = "sha256:33ef5fc15e8937602d64022209cdb2777b32dadf742f41332023d946041b3c14" }
variable "TRITON_DIGEST" { default = "sha256:71a23d2f27001af58c242380fe05c9d46d5dbc79913d62c60de72543964267df" }
variable "PYTHON_DIGEST" { default = "sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579" }

variable "PYTHON_TAG" { default = "3.12-slim-bookworm" }

# What the release holds. Its TensorRT and DALI are what pyproject.toml pins, so that local installations have the same.
variable "CUDA" { default = "13.4.1" }
# The oldest driver that CUDA 13 runs on, by its minor version compatibility.
variable "MIN_DRIVER" { default = "580.65.06" }

# What an image may add to its base, in MB of 10^6 bytes, uncompressed.
variable "PREPROCESS_BUDGET_MB" { default = "450" }
variable "TRAIN_BUDGET_MB" { default = "330" }
variable "EXPORT_BUDGET_MB" { default = "550" }
variable "VALIDATE_BUDGET_MB" { default = "580" }
variable "ANALYZE_BUDGET_MB" { default = "600" }
variable "PROMOTE_BUDGET_MB" { default = "360" }
variable "SERVE_BUDGET_MB" { default = "1000" }
variable "MLFLOW_BUDGET_MB" { default = "920" }
variable "CLI_BUDGET_MB" { default = "330" }
