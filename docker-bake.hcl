# docker buildx bake -f containers/versions.hcl -f docker-bake.hcl [TARGET]
# Without a target: all images. PYTORCH_BASE, TRITON_BASE and PYTHON_BASE replace the bases, for smoke tests.

variable "REGISTRY" { default = "ghcr.io/enginery" }
variable "VERSION" { default = "0.2.0" }
variable "SOURCE" { default = "unknown" }
variable "REVISION" { default = "unknown" }
variable "SOURCE_DATE_EPOCH" { default = "315532800" } # 1980-01-01: no zip file can hold an earlier time
variable "PYTORCH_BASE" { default = "" }
variable "TRITON_BASE" { default = "" }
variable "PYTHON_BASE" { default = "" }

function "pinned" {
  params = [repository, tag, digest]
  result = equal(digest, "") ? "${repository}:${tag}" : "${repository}:${tag}@${digest}"
}

function "base" {
  params = [own, repository, tag, digest]
  result = equal(own, "") ? pinned(repository, tag, digest) : own
}

group "default" {
  targets = ["steps", "slim", "serve"]
}

target "_shared" {
  context = "."
  platforms = ["linux/amd64"]
  labels = {
    "org.opencontainers.image.source" = SOURCE
  }
}

target "steps" {
  inherits = ["_shared"]
  matrix = {
    step = ["preprocess", "train", "export", "validate", "analyze"]
  }
  name = step
  dockerfile = "containers/steps/Dockerfile"
  target = step
  tags = ["${REGISTRY}/${step}:${VERSION}"]
  args = {
    BASE_IMAGE = base(PYTORCH_BASE, "nvcr.io/nvidia/pytorch", "${NGC_RELEASE}-py3", PYTORCH_DIGEST)
    REVISION = REVISION
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
    STEP = step
    VERSION = VERSION
  }
}

target "slim" {
  inherits = ["_shared"]
  matrix = {
    image = ["promote", "mlflow", "cli"]
  }
  name = image
  dockerfile = "containers/${image}/Dockerfile"
  tags = ["${REGISTRY}/${image}:${VERSION}"]
  args = {
    BASE_IMAGE = base(PYTHON_BASE, "docker.io/library/python", PYTHON_TAG, PYTHON_DIGEST)
    REVISION = REVISION
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
    VERSION = VERSION
  }
}

target "serve" {
  inherits = ["_shared"]
  dockerfile = "containers/serve/Dockerfile"
  tags = ["${REGISTRY}/serve:${VERSION}"]
  args = {
    BASE_IMAGE = base(TRITON_BASE, "nvcr.io/nvidia/tritonserver", "${NGC_RELEASE}-py3", TRITON_DIGEST)
    REVISION = REVISION
    VERSION = VERSION
  }
}
