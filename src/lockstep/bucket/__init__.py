"""Runs in a bucket (S3, Google Cloud Storage, Azure or another fsspec URL): objects, local copies and uploads."""
