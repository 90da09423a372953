# The versions of every image. One NGC release for all; containers/check_versions.py compares what is said here with the
# Dockerfiles, the documents and, where an engine can reach them, the images themselves.

variable "NGC_RELEASE" { default = "26.08" }

# Digests pin what the tags name today: "sha256:" and 64 hexadecimal digits. Empty where nobody has looked them up, and
# then the tag alone counts; `containers/pin` fills them, and a release is refused without them.
variable "PYTORCH_DIGEST" { default = "" }
variable "TRITON_DIGEST" { default = "" }
variable "PYTHON_DIGEST" { default = "" }

variable "PYTHON_TAG" { default = "3.12-slim-bookworm" }

# What the two NGC images of the release carry. A plan runs only on the TensorRT that built it.
variable "PYTORCH_TENSORRT" { default = "11.2" }
variable "TRITON_TENSORRT" { default = "11.2" }
variable "CUDA" { default = "13.4" }
# The oldest driver that CUDA 13 runs on, by its minor version compatibility.
variable "MIN_DRIVER" { default = "580.65.06" }

# What an image may add to its base, in MB of 10^6 bytes, uncompressed.
variable "PREPROCESS_BUDGET_MB" { default = "450" }
variable "TRAIN_BUDGET_MB" { default = "250" }
variable "EXPORT_BUDGET_MB" { default = "550" }
variable "VALIDATE_BUDGET_MB" { default = "580" }
variable "PROMOTE_BUDGET_MB" { default = "360" }
variable "SERVE_BUDGET_MB" { default = "10" }
variable "MLFLOW_BUDGET_MB" { default = "920" }
