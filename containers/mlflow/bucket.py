"""Make the bucket of MLFLOW_ARTIFACTS_DESTINATION unless it is there. A store that is just starting is waited for."""

import os
import sys
import time
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

_PATIENCE_S = float(os.environ.get("ENGINERY_STORE_PATIENCE_S", "120"))
_REFUSED = (301, 400, 401, 403)  # keys, permission, region: waiting helps with none of them
_OURS = ("BucketAlreadyOwnedByYou", "BucketAlreadyExists")  # two servers that start at once


def main() -> None:
    """Ends with a message that names the fix where there is no bucket in the end."""
    place = os.environ.get("MLFLOW_ARTIFACTS_DESTINATION", "")
    bucket = urlsplit(place).netloc
    if urlsplit(place).scheme != "s3" or not bucket:
        sys.exit(f"ENGINERY_MAKE_BUCKET needs a bucket in MLFLOW_ARTIFACTS_DESTINATION, such as s3://mlflow: {place!r}")
    endpoint = os.environ.get("MLFLOW_S3_ENDPOINT_URL") or None
    limits = Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 1})
    client = boto3.client("s3", endpoint_url=endpoint, config=limits)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            _make(client, bucket)
            return
        except (BotoCoreError, ClientError) as error:
            status = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status in _REFUSED or time.monotonic() > deadline:
                sys.exit(
                    f"the store {endpoint or 'of AWS'} gives no bucket {bucket!r} ({error}). See that it runs and that "
                    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are its keys; or make the bucket yourself and set "
                    "ENGINERY_MAKE_BUCKET=false"
                )
        time.sleep(1)


def _make(client: "boto3.client", bucket: str) -> None:
    try:
        client.head_bucket(Bucket=bucket)
        return
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
    region = client.meta.region_name
    # us-east-1 is what S3 takes for none, and the one region that it refuses as a constraint
    options = {} if region in (None, "us-east-1") else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    try:
        client.create_bucket(Bucket=bucket, **options)
    except ClientError as error:
        if error.response["Error"]["Code"] not in _OURS:
            raise


if __name__ == "__main__":
    main()
