"""Lockstep against its peers at the same work: PPO on the same compiled Snake, the same networks, the same numbers.

OMP_NUM_THREADS=1 python benchmarks/peers/run.py
OMP_NUM_THREADS=1 python benchmarks/peers/run.py --only sb3,lockstep --nets mlp --rounds 5 --json peers.json

Each peer lives in a virtual environment of its own, made from the package index on first use (about 5 GB in all, in
~/.cache/lockstep-peers); a peer that does not install or run is named, with the reason, and left out. Contenders take
turns, and every turn is a new process on one thread that warms up before it is timed. The figure is steps per
CPU-second, which other work on the machine disturbs least.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = Path(os.environ.get("LOCKSTEP_PEERS", Path.home() / ".cache" / "lockstep-peers"))
TORCH = "torch==2.13.0"  # the same for all, and first: what a peer would choose may be another build
SNAKE = ["numba==0.68.1", "numpy", "gymnasium", "PyYAML", "safetensors"]
INSTALL_LIMIT, RUN_LIMIT = 1200, 3600  # seconds

PEERS = {
    "sb3": ["stable-baselines3==2.9.*"],
    "skrl": ["skrl==2.1.*"],
    # Without pandas, tensordict searches the whole path for it at every output of every module.
    "torchrl": ["torchrl==0.14.*", "tensordict==0.14.*", "pandas"],
    "puffer": ["numpy<2", "setuptools", "wheel", "Cython", "ninja"],
}
PUFFER = "pufferlib==3.0.0"
SCRIPTS = {
    "lockstep": ["lockstep_peer.py"],
    "lockstep-bf16": ["lockstep_peer.py", "--precision", "bf16"],
    "sb3": ["sb3.py"],
    "skrl": ["skrl_peer.py"],
    "torchrl": ["torchrl_peer.py"],
    "puffer": ["puffer.py"],
}
STEPS = {"cnn": 32_768, "mlp": 262_144}  # tens of seconds each


class PeerError(Exception):
    """A peer did not install or run; the message is for the reader of the table."""


def call(words, limit, **environment):
    """Run a command to its end and return what it printed; what went wrong becomes a PeerError."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | environment
    HOME.mkdir(parents=True, exist_ok=True)
    try:
        # Not in the checkout: importing PufferLib leaves a link named `resources` where it was started.
        done = subprocess.run(
            [str(word) for word in words], env=env, capture_output=True, text=True, timeout=limit, cwd=HOME
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"took more than {limit} s") from None
    if done.returncode:
        # The last word that names an error says more than pip's closing advice.
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or line.startswith(("error", "ERROR"))]
        raise PeerError((errors or lines or [f"exit code {done.returncode}"])[-1])
    return done.stdout


def python_of(contender):
    """The interpreter of a contender; its virtual environment is made if it is not there yet."""
    peer = contender.split("-")[0]
    if peer == "lockstep":
        return sys.executable
    home = HOME / peer
    python, recipe = home / "bin" / "python", json.dumps([TORCH, SNAKE, PEERS[peer], str(ROOT)])
    ready = home / "ready"  # written last, so that an environment cut short is made anew
    if ready.exists() and ready.read_text() == recipe:
        return python
    print(f"{peer}: making {home} ...", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    call([*pip, TORCH], INSTALL_LIMIT)
    call([*pip, TORCH, *SNAKE, *PEERS[peer]], INSTALL_LIMIT)
    if peer == "puffer":
        install_puffer(pip, home)
    call([*pip, "--no-deps", "-e", ROOT], INSTALL_LIMIT)
    ready.write_text(recipe)
    return python


def install_puffer(pip, home):
    """Install PufferLib without its own games, which download raylib and box2d and compile for long.

    Its setup.py reads a name that it defines only together with the games, and requires CUDA if it finds nvcc. A
    sitecustomize module, which Python imports at startup, works around both.
    """
    fixes = home / "fixes"
    fixes.mkdir()
    (fixes / "sitecustomize.py").write_text(
        "import builtins, shutil\n"
        "builtins.c_extension_paths = []\n"
        "find = shutil.which\n"
        "shutil.which = lambda name, *rest, **more: None if name == 'nvcc' else find(name, *rest, **more)\n"
    )
    options = {"PYTHONPATH": str(fixes), "NO_OCEAN": "1", "MAX_JOBS": "1"}
    call([*pip, "--no-build-isolation", TORCH, PUFFER], INSTALL_LIMIT, **options)


def run(contender, *words):
    """One turn of a contender, in a process of its own: the line of JSON it printed."""
    script, *fixed = SCRIPTS[contender]
    return run_script(contender, HERE / script, *fixed, *words)


def run_script(contender, script, *words):
    # A cache of its own for numba: peers may have other versions of it than the checkout's user.
    cache = HOME / "numba" / contender.split("-")[0]
    out = call([python_of(contender), script, *words], RUN_LIMIT, NUMBA_CACHE_DIR=str(cache))
    return json.loads(out.strip().splitlines()[-1])


def chosen(words, known):
    names = words.split(",")
    if unknown := set(names) - set(known):
        raise SystemExit(f"{', '.join(sorted(unknown))} is not known here. Choose among {', '.join(known)}.")
    return names


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCRIPTS), help=f"some of {','.join(SCRIPTS)}")
    parser.add_argument("--nets", default="cnn,mlp", help="cnn, mlp or both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"environment steps to measure in each turn; by default {STEPS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there too")
    return parser.parse_args()


def summary(values):
    """Median, and the spread from least to most as a share of it."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / middle


def table(results, net):
    """Markdown: contenders by their median, and how many times theirs ours is."""
    rows = {}
    for result in results:
        if result["net"] == net:
            rows.setdefault(result["contender"], []).append(result)
    speed = {
        name: {key: summary([one["steps"] / one[f"{key}_seconds"] for one in turns]) for key in ("cpu", "wall")}
        for name, turns in rows.items()
    }

    def times(one, other):
        """How many times faster, round by round: neighbours in time share the machine's moods."""
        seconds = [{turn["round"]: turn["cpu_seconds"] for turn in rows[name]} for name in (one, other)]
        return statistics.median(seconds[1][turn] / seconds[0][turn] for turn in seconds[0].keys() & seconds[1].keys())

    ours = [name for name in ("lockstep", "lockstep-bf16") if name in speed]
    heads = [net, "version", "steps / CPU s", "spread", "steps / wall s", "spread", *(f"{name} is" for name in ours)]
    lines = ["| " + " | ".join(heads) + " |", "| --- | --- |" + " ---: |" * (4 + len(ours))]
    for name in sorted(speed, key=lambda name: -speed[name]["cpu"][0]):
        cells = [rows[name][0]["peer"], rows[name][0]["version"]]
        for middle, spread in speed[name].values():
            cells += [f"{middle:,.0f}", f"{spread:.0%}"]
        cells += [f"{times(one, name):.2f}x" for one in ours]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save(path, results, absent):
    if path:
        names = {who if isinstance(who, str) else "/".join(who): why for who, why in absent.items()}
        path.write_text(json.dumps({"results": results, "absent": names}, indent=1) + "\n")


def main():
    args = parse()
    nets, contenders = chosen(args.nets, STEPS), chosen(args.only, SCRIPTS)
    # A cached kernel does not notice a change in the files it calls.
    shutil.rmtree(HOME / "numba", ignore_errors=True)
    results, absent = [], {}
    for contender in contenders:
        try:
            python_of(contender)
        except (PeerError, OSError, subprocess.CalledProcessError) as error:  # no network, no disk, no pip
            absent[contender] = f"did not install: {error}"
            print(f"{contender} {absent[contender]}", flush=True)
    for turn in range(args.rounds):
        for net in nets:
            # A different one begins each round, so that nobody always follows the same neighbour.
            for contender in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
                if contender in absent or (contender, net) in absent:
                    continue
                try:
                    result = run(contender, "--net", net, "--steps", args.steps or STEPS[net])
                except PeerError as error:
                    absent[contender, net] = f"did not run {net}: {error}"
                    print(f"{contender} {absent[contender, net]}", flush=True)
                    continue
                results.append({"contender": contender, "round": turn} | result)
                save(args.json, results, absent)  # as they come: the whole takes long
                rate = result["steps"] / result["cpu_seconds"]
                print(f"round {turn + 1} of {args.rounds}, {net}, {contender}: {rate:,.0f} steps / CPU s", flush=True)
    for net in nets:
        print("\n" + table(results, net))
    for who, why in absent.items():
        print(f"\n{who if isinstance(who, str) else who[0]} {why}")
    save(args.json, results, absent)


if __name__ == "__main__":
    main()
