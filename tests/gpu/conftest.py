"""Tests on emulated CUDA devices: processes are forked from a server whose torch has them."""

import pytest

from processes import use_emulated_gpus


@pytest.fixture(autouse=True, scope="package")
def _emulated_gpus():
    use_emulated_gpus(True)
    yield
    use_emulated_gpus(False)
