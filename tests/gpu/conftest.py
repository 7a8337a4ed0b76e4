"""Fork test processes from a server whose torch has emulated CUDA devices."""

import pytest

from helpers.multiprocess import use_emulated_gpus


@pytest.fixture(autouse=True, scope="package")
def _emulated_gpus():
    use_emulated_gpus(True)
    yield
    use_emulated_gpus(False)
