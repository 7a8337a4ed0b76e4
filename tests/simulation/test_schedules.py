"""Random schedules of starts, kills, stalls and power cuts on a simulated disk. A failure prints the seed.

LOCKSTEP_SCHEDULES=1000000 pytest tests/simulation      the nightly number
"""

import os

from world import Violation, World

SCHEDULES = int(os.environ.get("LOCKSTEP_SCHEDULES", "20000"))


def schedule(seed):
    """Simulate a run: a first start, one or two concurrent starts that may use an older checkpoint, a last start."""
    world = World(seed)
    random = world.random
    world.start("first", saves=random.randint(1, 5))
    if random.random() < 0.5:  # otherwise it still trains when the others start
        world.run(kill=random.choice([0, 0.01]))
    for number in range(random.randint(1, 2)):
        at = random.randint(1, 4) if random.random() < 0.25 else None
        world.start(f"second{number}", at=at, saves=random.randint(0, 3))
    world.run(kill=random.choice([0, 0, 0.02]), stall=random.choice([0, 0.05, 0.15]), cut=random.choice([0, 0.005]))
    if random.random() < 0.5:
        world.check_at_the_end()
        world.watching = True
        world.start("third", saves=random.randint(0, 3))
        world.run(stall=0.05)
    world.check_at_the_end()
    return world


def explore(seeds, stop_at=None):
    """Run schedules; return the violations by seed, the number of distinct directory states, and the operations."""
    states, violations, operations = set(), {}, 0
    for seed in seeds:
        try:
            world = schedule(seed)
        except Violation as violation:
            violations[seed] = str(violation)
            if len(violations) == stop_at:
                break
            continue
        states |= world.states
        operations += len(world.scheduler.trace)
    return violations, len(states), operations


def test_invariants_hold_in_every_schedule():
    violations, states, operations = explore(range(SCHEDULES))
    assert not violations, f"{len(violations)} of {SCHEDULES} schedules, such as seed {next(iter(violations.items()))}"
    assert states > 100
    assert operations > 50 * SCHEDULES


if __name__ == "__main__":
    import sys
    import time

    first, stop = map(int, sys.argv[1:3])
    began = time.process_time()
    violations, states, operations = explore(range(first, stop))
    print(
        f"{stop - first} schedules, {states} states, {operations} operations, {time.process_time() - began:.1f} CPU s"
    )
    print(f"{len(violations)} violations", *list(violations.items())[:12], sep="\n  ")
