"""What saves cost in a bucket: requests and bytes of each, how long training stops, and its speed beside a directory.

    python benchmarks/bucket_saves.py [--rounds 3] [--latency 0.05]

DDPG on Pendulum, a save every 2,000 samples, on one process. The bucket is on an S3 server (moto) on this machine, in a
process of its own, that answers each request after `latency` seconds. Directory and bucket are trained in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep.bucket.urls import is_url
from lockstep.bucket_copy import copy_run

TESTS = Path(__file__).parents[1] / "tests"
SAVE_EVERY, SAVES = 2_000, 6
SERVER = """
import json, signal, sys, time
from pathlib import Path
from helpers.s3_server import S3Server, make_bucket
server = S3Server()
latency, record = float(sys.argv[1]), Path(sys.argv[2]).open("a")
import os
os.environ.update(server.environment)
make_bucket(server.environment, "bucket")
def answer(request):
    time.sleep(latency)
    record.write(json.dumps(request) + "\\n")
    record.flush()
    return ""
server.fault = answer
print(json.dumps(server.environment), flush=True)
signal.pause()
"""


def train(runs_dir: str, name: str) -> tuple[float, float]:
    """Train a run. Return its samples per second after the first save, and the milliseconds a save stops training."""
    words = ["train", "gym-ddpg", "--task.id", "Pendulum-v1", f"run.runs_dir={runs_dir}", f"run.name={name}"]
    words += [f"run.total_samples={SAVES * SAVE_EVERY}", f"run.save_every={SAVE_EVERY}", f"run.log_every={SAVE_EVERY}"]
    words += ["run.eval_every=none", "run.record_video=false", "algo.learning_starts=500"]
    ended = subprocess.run([sys.executable, "-m", "lockstep", *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    speeds = [line.split()[4] for line in ended.stdout.splitlines() if " steps " in line and "/s" in line]
    speed = statistics.median(float(speed.removesuffix("/s").replace(",", "")) for speed in speeds[1:])
    with tempfile.TemporaryDirectory() as directory:
        run = Path(runs_dir, name)
        if is_url(runs_dir):
            run = Path(directory)
            copy_run(f"{runs_dir}/{name}", run, "logs")
        lines = (run / "metrics.jsonl").read_text()
    # The time to copy the state, and to wait for the save before if it has not ended.
    stops = [json.loads(line).get("time/copy", 0.0) for line in lines.splitlines()]
    return speed, 1000 * sum(stops) / SAVES


def cost(record: Path, name: str) -> list[dict[str, int]]:
    """Return requests and uploaded bytes from each manifest of a run to the next."""
    saves, requests, size = [], 0, 0
    for line in record.read_text().splitlines():
        method, path, query, length = json.loads(line)
        if f"/{name}/" not in path and f"%2F{name}" not in query:
            continue
        requests, size = requests + 1, size + (length if method == "PUT" else 0)
        if method == "PUT" and path.endswith("-g0001.json"):
            saves.append({"requests": requests, "bytes": size})
            requests, size = 0, 0
    return saves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.05)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "requests.jsonl"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        words = [sys.executable, "-c", SERVER, str(options.latency), str(record)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as server:
            assert server.stdout is not None
            os.environ |= json.loads(server.stdout.readline())
            os.environ["OMP_NUM_THREADS"] = "1"
            measured: dict[str, list[tuple[float, float]]] = {"directory": [], "bucket": []}
            for number in range(options.rounds):
                measured["directory"].append(train(directory, f"local-{number}"))
                measured["bucket"].append(train("s3://bucket/runs", f"remote-{number}"))
                for place, values in measured.items():
                    speed, stop = values[-1]
                    print(
                        f"round {number + 1}, {place}: {speed:.0f} samples/s, a save stops training for {stop:.1f} ms"
                    )
            time.sleep(0.5)
            for number, save in enumerate(cost(record, "remote-0"), 1):
                print(f"save {number}: {save['requests']} requests, {save['bytes']:,} bytes uploaded")
            pairs = zip(measured["bucket"], measured["directory"], strict=True)
            ratio = statistics.median(bucket[0] / local[0] for bucket, local in pairs)
            print(f"speed in the bucket: {ratio:.2f} of that in a directory (median of {options.rounds})")
            server.kill()


if __name__ == "__main__":
    main()
