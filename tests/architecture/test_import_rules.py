"""The architecture rules: checks of the package's source that linters do not have.

A rule is a function from one module's source to its violations. Every rule is also tested on injected faults, so that a
rule that detects nothing is noticed.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"


class Use(NamedTuple):
    """The use of an imported name, in full (`torch.distributed.all_reduce`)."""

    line: int
    name: str
    call: ast.Call | None
    """The call, if the name is called."""


class Violation(NamedTuple):
    line: int
    words: str


@dataclass(frozen=True)
class Module:
    """The source of one module; `path` is inside the package, such as `nn/encoders.py`."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Full name of each imported name, wherever in the module it is imported."""
        known = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    known[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return known

    def resolve(self, node: ast.AST) -> str | None:
        """Return the full name of an expression, also through `getattr` and `import_module` with a literal string."""
        match node:
            case ast.Name(id=name):
                return self.aliases.get(name)
            case ast.Attribute(value=value, attr=name):
                base = self.resolve(value)
                return f"{base}.{name}" if base else None
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                base = self.resolve(value)
                return f"{base}.{name}" if base else None
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                return name
        return None

    @cached_property
    def uses(self) -> list[Use]:
        """Every imported name and every use of one, in its longest form."""
        nodes = list(ast.walk(self.tree))
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
        found = []
        for node in nodes:
            if isinstance(node, ast.Import):
                found += [Use(node.lineno, alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [Use(node.lineno, f"{node.module}.{alias.name}", None) for alias in node.names]
            elif id(node) not in inner and (name := self.resolve(node)):
                found.append(Use(node.lineno, name, calls.get(id(node))))
        return found

    def builtins(self, *names: str) -> Iterator[Violation]:
        """Yield uses of builtins, unless the module imports something else under that name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id in names and node.id not in self.aliases:
                yield Violation(node.lineno, f"{node.id}()")

    def within(self, *folders: str) -> bool:
        return any(self.path.startswith(f"{folder}/") for folder in folders)


def under(name: str, *roots: str) -> bool:
    """Return whether a full name is one of the roots or inside one: `torch.distributions` is not in `torch.dist`."""
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def has_keyword(call: ast.Call | None, name: str | None) -> bool:
    """Return whether a call passes a value other than None by this keyword; the keyword None is `**`."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == name] if call else []
    return bool(given) and not (isinstance(given[0], ast.Constant) and given[0].value is None)


# -------------------------------------------------------------------------------------------------------- the rules


RUNTIME = ("distributed", "launch", "tools/audit")
NOT_RUNTIME = ("launch/process_lifetime.py", "tools/audit/analysis.py")
"""Modules in the runtime's directories to which the rules apply."""


def is_runtime(module: Module) -> bool:
    return module.within(*RUNTIME) and module.path not in NOT_RUNTIME


def only_the_runtime_talks_to_other_processes(module: Module) -> Iterator[Violation]:
    roots = ("torch.distributed", "torch._C._distributed_c10d", "torch.nn.parallel", "torch.utils.data.distributed")
    if not is_runtime(module):
        yield from (Violation(use.line, use.name) for use in module.uses if under(use.name, *roots))


def only_the_runtime_asks_which_process_it_is(module: Module) -> Iterator[Violation]:
    variables = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
    if is_runtime(module):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in variables:
            yield Violation(node.lineno, f"the environment variable {node.value}")


def algorithms_and_tasks_do_not_know_their_process(module: Module) -> Iterator[Violation]:
    if not module.within("algorithms", "tasks", "nn", "data", "recipes"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("rank", "local_rank", "world_size"):
            yield Violation(node.lineno, f".{node.attr}")


def algorithms_touch_no_files_logs_or_environment(module: Module) -> Iterator[Violation]:
    if module.within("algorithms"):
        roots = ("os.environ", "os.getenv", "os.putenv", "logging", "pathlib", "shutil", "tempfile")
        yield from (Violation(use.line, use.name) for use in module.uses if under(use.name, *roots))
        yield from module.builtins("open")


PICKLES = (
    *("pickle", "_pickle", "pickle5", "cloudpickle", "dill", "jsonpickle", "shelve", "marshal", "joblib"),
    *("multiprocessing.connection", "multiprocessing.managers"),
    *("torch.load", "torch.jit.load", "torch.hub", "torch.package", "torch.serialization"),
    *("torch.distributed.checkpoint", "torch.distributed.rpc"),
    "pandas.read_pickle",
)
TENSORS_ALONE = "tools/export/load_state_dict.py"
"""The only module that may call torch.load, with weights_only, to import models of other programs."""
YAML = {"safe_load", "safe_load_all", "safe_dump", "safe_dump_all", "dump", "YAMLError", "SafeLoader", "SafeDumper"}
OBJECT_COLLECTIVE = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?")


def nothing_can_unpickle(module: Module) -> Iterator[Violation]:
    for use in module.uses:
        root, _, rest = use.name.partition(".")
        unsafe_yaml = root == "yaml" and rest and rest.partition(".")[0] not in YAML
        if use.name == "torch.load" and module.path == TENSORS_ALONE and only_weights(use.call):
            continue
        if under(use.name, *PICKLES) or unsafe_yaml:
            yield Violation(use.line, use.name)
        elif use.name == "numpy.load" and use.call and (len(use.call.args) > 2 or has_keyword(use.call, None)):
            yield Violation(use.line, "numpy.load with arguments that may allow pickle")
    for node in ast.walk(module.tree):
        names = [node.attr] if isinstance(node, ast.Attribute) else [node.id] if isinstance(node, ast.Name) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        yield from (Violation(node.lineno, name) for name in names if OBJECT_COLLECTIVE.fullmatch(name))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not is_false(node.value):
            yield Violation(node.value.lineno, "allow_pickle")


def only_weights(call: ast.Call | None) -> bool:
    """Return whether a call of torch.load passes `weights_only=True` literally."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"] if call else []
    return len(given) == 1 and isinstance(given[0], ast.Constant) and given[0].value is True


def is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def nothing_runs_text_as_code(module: Module) -> Iterator[Violation]:
    yield from module.builtins("eval", "exec", "__import__")
    yield from (Violation(use.line, use.name) for use in module.uses if under(use.name, "builtins"))


TORCH_DRAWS = re.compile(
    r"torch\.(rand\w*|bernoulli|multinomial|normal|poisson|seed|initial_seed|manual_seed|[gs]et_rng_state|random(\..*)?"
    r"|(cuda|mps|xpu)\.(seed|manual_seed|[gs]et_rng_state)\w*"
    r"|nn\.(functional\.)?(\w*[dD]ropout\w*|gumbel_softmax|rrelu|RReLU))"
)
TENSOR_DRAWS = {
    *("uniform_", "normal_", "log_normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_"),
    *("multinomial", "rsample"),
}
NUMPY_GENERATORS = ("Generator", "BitGenerator", "SeedSequence", "Philox", "PCG64", "PCG64DXSM", "SFC64", "default_rng")
FORKED_SCOPE = "rng.py"
RANDOM_ALLOWED = {
    # Torch's layers draw initial weights, so one module may seed the global generator, only inside `fork_rng`.
    # It also tells whether a network draws in training: the algorithm then seeds every draw.
    FORKED_SCOPE: {"torch.random.fork_rng", "torch.manual_seed", "torch.get_rng_state", "torch.cuda.get_rng_state"},
    "nn/networks.py": {"torch.nn.Dropout"},  # supervised learning seeds it by the position in the run
    # The environment checker tests whether a task has used the global generators.
    "tasks/env_checker/__init__.py": {
        "random.getstate",
        "numpy.random.get_state",
        "torch.get_rng_state",
        "torch.random.get_rng_state",
    },
    # The process of a submission seeds the generators that the submission may use.
    "tasks/team_snakes/submission_server.py": {"random.seed", "random.randrange"},
    # An audit compares the states of a script's global generators between processes.
    "launch/fork_server.py": {"numpy.random.seed"},  # forks must not share a generator state
    "tools/audit/recorder.py": {"random.getstate", "numpy.random.get_state", "torch.get_rng_state"},
}


def nothing_reads_global_random_state(module: Module) -> Iterator[Violation]:
    forked = forked_lines(module)
    for use in module.uses:
        allowed = use.name in RANDOM_ALLOWED.get(module.path, ())
        if use.name == "torch.manual_seed":
            allowed = allowed and use.line in forked
        if draws_from_global_state(use) and not allowed:
            yield Violation(use.line, use.name)
    # Methods of tensors and distributions draw from torch's global generator by default.
    methods = TENSOR_DRAWS | (
        {"sample"} if any(under(use.name, "torch.distributions") for use in module.uses) else set()
    )
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            name = module.resolve(node.func) or ""
            if not under(name, "torch.nn.init") and not has_keyword(node, "generator"):
                yield Violation(node.lineno, f".{node.func.attr}()")


def draws_from_global_state(use: Use) -> bool:
    """Return whether a name uses global random state or creates an unseeded generator."""
    seeded = use.call is None or bool(use.call.args or use.call.keywords)
    if under(use.name, "torch"):
        return bool(TORCH_DRAWS.fullmatch(use.name)) and not has_keyword(use.call, "generator")
    if under(use.name, "numpy.random") and use.name != "numpy.random":
        return use.name.split(".")[2] not in NUMPY_GENERATORS or not seeded
    return use.name.startswith("random.") and not (use.name == "random.Random" and seeded)


def forked_lines(module: Module) -> set[int]:
    """Return the lines inside a `with torch.random.fork_rng(...)`."""
    lines: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            if any(module.resolve(call.func) == "torch.random.fork_rng" for call in calls):
                lines |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return lines


def nothing_prints(module: Module) -> Iterator[Violation]:
    yield from module.builtins("print")


PRINTING = {
    "io/printable.py": {"sys.stdout.write", "sys.stderr.write"},
    "io/rich_console.py": {"rich.console.Console"},
    "tasks/gym/worker_pool.py": {"sys.stderr.write"},  # output of a user's environment is passed on unchanged
}


def terminal_output_is_made_printable(module: Module) -> Iterator[Violation]:
    """Output may quote untrusted files, so it must use io.printable.write_text or io.rich_console.PrintableConsole."""
    for use in module.uses:
        raw = under(use.name, "rich.console.Console", "rich.print", "rich.get_console") or re.fullmatch(
            r"sys\.(__)?std(out|err)(__)?\.(write|writelines|buffer.*)", use.name
        )
        if raw and use.name not in PRINTING.get(module.path, ()):
            yield Violation(use.line, use.name)


def files_stay_small(module: Module) -> Iterator[Violation]:
    lines = len(module.text.splitlines())
    if lines > 400:
        yield Violation(400, f"{lines} lines, more than 400: split the file")


def recipes_stay_small(module: Module) -> Iterator[Violation]:
    for node in module.tree.body:
        if module.within("recipes") and isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > 60:
                yield Violation(node.lineno, f"the recipe {node.name} has {lines} lines, more than 60")


def modules_and_names_say_their_job(module: Module) -> Iterator[Violation]:
    if not ast.get_docstring(module.tree):
        yield Violation(1, "no module docstring")
    if {"utils", "util", "helpers", "helper", "common", "misc"} & set(re.split(r"[/.]", module.path)):
        yield Violation(1, "a module name that does not describe its content")
    for node in ast.walk(module.tree):
        # CheckpointManager is the common name for a class that saves and restores checkpoints.
        vague = r"Base[A-Z]\w*|(?!CheckpointManager$)\w+Manager"
        if isinstance(node, ast.ClassDef) and re.fullmatch(vague, node.name):
            yield Violation(node.lineno, f"the name {node.name}")


Rule = Callable[[Module], Iterator[Violation]]
RULES: list[Rule] = [
    only_the_runtime_talks_to_other_processes,
    only_the_runtime_asks_which_process_it_is,
    algorithms_and_tasks_do_not_know_their_process,
    algorithms_touch_no_files_logs_or_environment,
    nothing_can_unpickle,
    nothing_runs_text_as_code,
    nothing_reads_global_random_state,
    nothing_prints,
    terminal_output_is_made_printable,
    files_stay_small,
    recipes_stay_small,
    modules_and_names_say_their_job,
]


@cache
def package_modules() -> list[Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 5, f"{PACKAGE} is not the package"
    return [Module(file.relative_to(PACKAGE).as_posix(), file.read_text()) for file in files]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_follows_architecture_rule(rule: Rule):
    violations = [
        f"src/lockstep/{module.path}:{line}: {words}" for module in package_modules() for line, words in rule(module)
    ]
    assert not violations, f"{rule.__name__} is violated:\n" + "\n".join(violations)


# -------------------------------------------------------------------------------------------------- injected faults

FAULTS: list[tuple[Rule, str, str]] = [
    (only_the_runtime_talks_to_other_processes, "train.py", "import torch.distributed as dist"),
    (only_the_runtime_talks_to_other_processes, "loggers/run_logger.py", "from torch import distributed"),
    (only_the_runtime_talks_to_other_processes, "loggers/run_logger.py", "from torch.distributed import barrier"),
    (only_the_runtime_talks_to_other_processes, "nn/mlp.py", "import torch\ntorch.distributed.barrier()"),
    (only_the_runtime_talks_to_other_processes, "nn/mlp.py", "import torch as t\ngetattr(t, 'distributed')"),
    (
        only_the_runtime_talks_to_other_processes,
        "a.py",
        "import importlib\nimportlib.import_module('torch.distributed')",
    ),
    (only_the_runtime_talks_to_other_processes, "launch.py", "import torch.distributed"),
    (only_the_runtime_talks_to_other_processes, "tools/play/playback.py", "import torch.distributed"),
    *((only_the_runtime_talks_to_other_processes, path, "import torch.distributed") for path in NOT_RUNTIME),
    *((only_the_runtime_asks_which_process_it_is, path, "rank = 'RANK'") for path in NOT_RUNTIME),
    (only_the_runtime_talks_to_other_processes, "a.py", "from torch.nn.parallel import DistributedDataParallel"),
    (only_the_runtime_asks_which_process_it_is, "loggers/run_logger.py", "import os\nos.environ['RANK']"),
    (only_the_runtime_asks_which_process_it_is, "cli/train.py", "from os import getenv\ngetenv('WORLD_SIZE', '1')"),
    (only_the_runtime_asks_which_process_it_is, "train.py", "import os\nx = 'LOCAL_RANK' in os.environ"),
    (algorithms_and_tasks_do_not_know_their_process, "algorithms/ppo.py", "def f(runtime): return runtime.rank == 0"),
    (algorithms_and_tasks_do_not_know_their_process, "tasks/snake/env.py", "seed = lanes.seed + lanes.rank"),
    (algorithms_touch_no_files_logs_or_environment, "algorithms/ppo.py", "import os\nos.environ.get('DEBUG')"),
    (algorithms_touch_no_files_logs_or_environment, "algorithms/ppo.py", "open('log.txt', 'w')"),
    (algorithms_touch_no_files_logs_or_environment, "algorithms/ppo.py", "from logging import getLogger"),
    (nothing_can_unpickle, "checkpoint/a.py", "import pickle"),
    (nothing_can_unpickle, "checkpoint/a.py", "def f():\n    from cloudpickle import loads"),
    (nothing_can_unpickle, "checkpoint/a.py", "import dill as safe"),
    (nothing_can_unpickle, "checkpoint/a.py", "import shelve"),
    (nothing_can_unpickle, "checkpoint/a.py", "import marshal"),
    (nothing_can_unpickle, "checkpoint/a.py", "from joblib import load"),
    (nothing_can_unpickle, "checkpoint/a.py", "import importlib\nimportlib.import_module('pickle')"),
    (nothing_can_unpickle, "checkpoint/a.py", "import torch\ntorch.load('x.pt', weights_only=True)"),
    (nothing_can_unpickle, "checkpoint/a.py", "from torch import load as read\nread('x.pt')"),
    (nothing_can_unpickle, TENSORS_ALONE, "import torch\ntorch.load('x.pt')"),
    (nothing_can_unpickle, TENSORS_ALONE, "import torch\ntorch.load('x.pt', weights_only=trusted)"),
    (nothing_can_unpickle, TENSORS_ALONE, "import torch\nread = torch.load"),
    (nothing_can_unpickle, "checkpoint/a.py", "import torch\ngetattr(torch, 'load')('x.pt')"),
    (nothing_can_unpickle, "checkpoint/a.py", "import torch.distributed.checkpoint as dcp"),
    (nothing_can_unpickle, "checkpoint/a.py", "import numpy as np\nnp.load('x.npy', allow_pickle=True)"),
    (nothing_can_unpickle, "checkpoint/a.py", "import numpy as np\nnp.load('x.npy', allow_pickle=trusted)"),
    (nothing_can_unpickle, "checkpoint/a.py", "import numpy as np\nnp.load('x.npy', None, True)"),
    (nothing_can_unpickle, "checkpoint/a.py", "import numpy as np\nnp.load('x.npy', **options)"),
    (nothing_can_unpickle, "checkpoint/a.py", "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)"),
    (nothing_can_unpickle, "checkpoint/a.py", "from yaml import unsafe_load"),
    (nothing_can_unpickle, "checkpoint/a.py", "import yaml\nyaml.full_load(text)"),
    (nothing_can_unpickle, "distributed/a.py", "import torch.distributed as dist\ndist.all_gather_object(out, x)"),
    (nothing_can_unpickle, "distributed/a.py", "from torch.distributed import broadcast_object_list"),
    (nothing_can_unpickle, "distributed/a.py", "self.group.send_object_list([x])"),
    (nothing_runs_text_as_code, "cli/a.py", "eval('1 + 1')"),
    (nothing_runs_text_as_code, "cli/a.py", "run = exec"),
    (nothing_runs_text_as_code, "cli/a.py", "__import__('pickle')"),
    (nothing_runs_text_as_code, "cli/a.py", "import builtins\nbuiltins.eval('1')"),
    (nothing_reads_global_random_state, "nn/a.py", "import torch\ntorch.manual_seed(0)"),
    (nothing_reads_global_random_state, FORKED_SCOPE, "import torch\ntorch.manual_seed(0)"),
    (nothing_reads_global_random_state, FORKED_SCOPE, "import torch\nwith torch.no_grad():\n    torch.manual_seed(0)"),
    (nothing_reads_global_random_state, FORKED_SCOPE, "import torch\nwith torch.random.fork_rng():\n    torch.rand(3)"),
    (nothing_reads_global_random_state, "nn/a.py", "import torch\ntorch.rand_like(x)"),
    (nothing_reads_global_random_state, "data/a.py", "from torch import randperm\nrandperm(8, generator=None)"),
    (nothing_reads_global_random_state, "nn/a.py", "from torch import nn\nnn.Dropout(0.1)"),
    (nothing_reads_global_random_state, "nn/a.py", "import torch.nn.functional as F\nF.gumbel_softmax(x)"),
    (nothing_reads_global_random_state, "nn/a.py", "x.normal_()"),
    (nothing_reads_global_random_state, "nn/a.py", "action = probabilities.multinomial(1)"),
    (nothing_reads_global_random_state, "nn/a.py", "from torch.distributions import Normal\nNormal(m, s).sample()"),
    (nothing_reads_global_random_state, "tasks/a.py", "import numpy as np\nnp.random.seed(0)"),
    (nothing_reads_global_random_state, "tasks/a.py", "from numpy.random import randint"),
    (nothing_reads_global_random_state, "tasks/a.py", "import numpy as np\nnp.random.default_rng()"),
    (nothing_reads_global_random_state, "tasks/a.py", "import random\nrandom.shuffle(x)"),
    (nothing_reads_global_random_state, "tasks/env_checker/__init__.py", "import random\nrandom.random()"),
    (nothing_reads_global_random_state, "tasks/a.py", "from random import choice"),
    (nothing_reads_global_random_state, "tasks/a.py", "import random\nrandom.Random().random()"),
    (nothing_prints, "cli/a.py", "print('hello')"),
    (terminal_output_is_made_printable, "cli/a.py", "import sys\nsys.stdout.write(name)"),
    (terminal_output_is_made_printable, "cli/a.py", "import sys\nsys.stderr.buffer.write(name)"),
    (terminal_output_is_made_printable, "cli/a.py", "from rich.console import Console"),
    (terminal_output_is_made_printable, "checkpoint/a.py", "import rich\nrich.print(name)"),
    (files_stay_small, "a.py", "x = 1\n" * 401),
    (recipes_stay_small, "recipes/a.py", "class Snake:\n" + "    x = 1\n" * 60),
    (modules_and_names_say_their_job, "a.py", "x = 1"),
    (modules_and_names_say_their_job, "nn/utils.py", '"""Things."""'),
    (modules_and_names_say_their_job, "a.py", '"""Runs."""\nclass RunManager: ...'),
    (modules_and_names_say_their_job, "a.py", '"""Tasks."""\nclass BaseTask: ...'),
]

VALID: list[tuple[str, str]] = [
    ("cli/a.py", '"""A."""\nimport sys\nfrom rich.console import Group\nwrite_text(sys.stdout, name)'),
    (
        "distributed/a.py",
        '"""A."""\nimport os\nimport torch.distributed as dist\ndist.all_reduce(x)\nos.environ["RANK"]',
    ),
    (
        "nn/a.py",
        '"""A."""\nfrom torch import nn\nfrom torch.distributions import Normal\nnn.init.normal_(x)\nNormal(m, s)',
    ),
    ("nn/a.py", '"""A."""\nimport torch\ntorch.randperm(8, generator=generator)\nmodel.eval()\ntorch.compile(model)'),
    (FORKED_SCOPE, '"""A."""\nimport torch\nwith torch.random.fork_rng(devices=[]):\n    torch.manual_seed(seed)'),
    (
        "tasks/env_checker/__init__.py",
        '"""A."""\nimport random\nimport torch\nx = random.getstate(), torch.get_rng_state()',
    ),
    ("rng.py", '"""A."""\nimport numpy as np\nnp.random.Generator(np.random.Philox(key=key)).random(3)'),
    ("tasks/a.py", '"""A."""\nimport numpy as np\nnp.random.default_rng(seed)\nnp.load("x.npy", allow_pickle=False)'),
    (
        "checkpoint/a.py",
        '"""A."""\nimport yaml\nyaml.safe_load(text)\nconsole.print("hello")\nopen("x")\nrandom.choice(x)',
    ),
    ("cli/a.py", '"""A."""\nfrom lockstep.cli import eval\neval.main()'),
    (TENSORS_ALONE, '"""A."""\nimport torch\ntorch.load("x.pt", weights_only=True)'),
]


@pytest.mark.parametrize(("rule", "path", "source"), FAULTS)
def test_rule_finds_injected_fault(rule: Rule, path: str, source: str):
    assert list(rule(Module(path, source)))


@pytest.mark.parametrize(("path", "source"), VALID)
def test_rules_accept_valid_code(path: str, source: str):
    assert [violation for rule in RULES for violation in rule(Module(path, source))] == []


def test_every_rule_has_an_injected_fault():
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


def test_test_file_names_are_unique():
    """pytest imports test files by name and would not collect the second one."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_ppo_stays_within_line_and_file_limits():
    """`.ci/count_ppo.py` has the limits and the files that a reader of PPO opens."""
    counted = subprocess.run(
        [sys.executable, ROOT / ".ci" / "count_ppo.py"], capture_output=True, text=True, check=False
    )
    assert counted.returncode == 0, counted.stdout


def test_public_class_names_are_unique():
    classes = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(classes) == sorted(set(classes))
