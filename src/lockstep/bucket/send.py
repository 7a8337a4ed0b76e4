"""Upload one file of a run: `python -m lockstep.bucket.send FILE FILE_WITH_URL`, for processes that must not wait."""

import sys
from pathlib import Path

from lockstep.bucket.client import Bucket


def main(file: Path, url: str) -> None:
    """Upload a file to the run with this URL."""
    Bucket(url).upload(file, file.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).read_text())
