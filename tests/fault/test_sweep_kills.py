"""A sweep whose processes are killed ends with the table, the best settings and the hashes of an undisturbed one."""

import random
import shutil
import subprocess
import time

import pytest
from killed_sweep import SWEEP, kill_sweep, results, start_sweep

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(7200)]

KILLS = 20
SECONDS = 3600


@pytest.mark.parametrize(("prune", "trials"), [("asha", 12), ("pbt", 4)])
def test_sweep_killed_20_times_equals_an_undisturbed_one(tmp_path, prune, trials):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    new = [*SWEEP, "--prune", prune, "--trials", str(trials), "--parallel", "2"]
    begun = time.monotonic()
    assert start_sweep(undisturbed, new).wait(SECONDS) == 0
    pace = (time.monotonic() - begun) / KILLS

    draw, kills, deadline = random.Random(0), 0, time.monotonic() + SECONDS
    process = start_sweep(killed, new)
    while True:
        try:
            code = process.wait(draw.uniform(0.1, 1.1) * pace if kills < KILLS else SECONDS)
        except subprocess.TimeoutExpired:
            kills += kill_sweep(process, draw)
            continue
        assert time.monotonic() < deadline
        if code == 0:
            break
        if not (killed / "runs" / "sweep" / "sweep.json").exists():
            shutil.rmtree(killed / "runs", ignore_errors=True)
        process = start_sweep(killed, new)  # killed, or a trial was killed three times
    assert kills >= KILLS
    assert results(killed) == results(undisturbed)
