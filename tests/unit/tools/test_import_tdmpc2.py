"""Import of checkpoints in the layout of the authors' TD-MPC2: equal outputs, sizes, evaluation and training."""

import json
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from lockstep.cli import main
from lockstep.inference import load_algorithm, load_recipe
from lockstep.tools.export.import_weights import read_weights

pytest.importorskip("dm_control")

ENCODER, WIDTH, LATENT, CRITICS, BINS = 24, 16, 32, 3, 11
LEAVES = ("weight", "bias", "ln.weight", "ln.bias")
SMOKE = ["--algo.seed-samples", "24", "--algo.batch-size", "32", "--algo.buffer-size", "512", "algo.rollout_steps=4"]
SMOKE += ["algo.updates_per_sample=0.0625", "task.episode_length=10", "run.device=cpu", "run.total_samples=256"]
SMOKE += ["algo.plan.num_samples=8", "algo.plan.num_policy_samples=2", "algo.plan.num_elites=4"]
SMOKE += ["algo.plan.iterations=1", "run.eval_every=none", "run.record_video=false"]


def layers(generator, sizes, ensemble=(), last_normed=False):
    """Random parameters of an MLP by upstream's names: normed layers and a linear output."""
    found = {}
    for number, (inputs, units) in enumerate(pairwise(sizes)):
        names = LEAVES if number < len(sizes) - 2 or last_normed else LEAVES[:2]
        for leaf in names:
            shape = (units, inputs) if leaf == "weight" else (units,)
            found[f"{number}.{leaf}"] = torch.randn(*ensemble, *shape, generator=generator) * (
                0.3 if leaf != "ln.weight" else 1
            )
    return found


def upstream(features=3, actions=(1,), task_dim=0, episodic=False, seed=0):
    """State dict in upstream's layout, with the metadata that tensordict adds."""
    generator = torch.Generator().manual_seed(seed)
    top, joint = max(actions), LATENT + task_dim + max(actions)
    nets = {
        "_encoder.state": layers(generator, [features + task_dim, ENCODER, LATENT], last_normed=True),
        "_dynamics": layers(generator, [joint, WIDTH, WIDTH, LATENT], last_normed=True),
        "_reward": layers(generator, [joint, WIDTH, WIDTH, BINS]),
        "_pi": layers(generator, [LATENT + task_dim, WIDTH, WIDTH, 2 * top]),
        "_Qs.params": layers(generator, [joint, WIDTH, WIDTH, BINS], (CRITICS,)),
        "_target_Qs_params": layers(generator, [joint, WIDTH, WIDTH, BINS], (CRITICS,)),
    }
    if episodic:
        nets["_termination"] = layers(generator, [LATENT + task_dim, WIDTH, WIDTH, 1])
    nets["_detach_Qs_params"] = nets["_Qs.params"]
    state = {f"{net}.{name}": x for net, tensors in nets.items() for name, x in tensors.items()}
    for net in ("_Qs.params", "_detach_Qs_params", "_target_Qs_params"):
        state |= {f"{net}.__batch_size": torch.Size([CRITICS]), f"{net}.__device": torch.device("cpu")}
    state |= {"log_std_min": torch.tensor(-10.0), "log_std_dif": torch.tensor(12.0)}
    if len(actions) > 1:
        state["_task_emb.weight"] = torch.randn(len(actions), task_dim, generator=generator)  # norms beyond 1
        state["_action_masks"] = (torch.arange(top) < torch.tensor(actions).unsqueeze(1)).float()
    return state


def as_older(state):
    """Number the tensors of the critics, as before upstream used torch.compile."""
    renamed = {}
    for name, x in state.items():
        if "Qs" not in name:
            renamed[name] = x
        elif not name.endswith(("__batch_size", "__device")) and "_detach" not in name:
            prefix, _, leaf = name.replace("_target_Qs_params.", "_target_Qs.params.").partition("params.")
            number, _, kind = leaf.partition(".")
            renamed[f"{prefix}params.{4 * int(number) + LEAVES.index(kind)}"] = x
    return renamed


def run_mlp(state, net, x, simplex=False, member=None):
    """Compute an MLP from upstream's names, layer by layer."""
    count = sum(name.startswith(f"{net}.") and name.endswith(".weight") and ".ln." not in name for name in state)
    pick = (lambda t: t) if member is None else (lambda t: t[member])
    for number in range(count):
        x = F.linear(x, pick(state[f"{net}.{number}.weight"]), pick(state[f"{net}.{number}.bias"]))
        if f"{net}.{number}.ln.weight" in state:
            norm = [pick(state[f"{net}.{number}.ln.{leaf}"]) for leaf in ("weight", "bias")]
            x = F.layer_norm(x, x.shape[-1:], *norm)
            if simplex and number == count - 1:
                return x.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)
            x = F.mish(x)
    return x


def upstream_outputs(state, obs, action, noise, task):
    def with_task(x):
        if task is None:
            return x
        table = state["_task_emb.weight"]
        return torch.cat([x, (table / table.norm(dim=1, keepdim=True).clamp(min=1.0))[task]], -1)

    z = run_mlp(state, "_encoder.state", with_task(obs), simplex=True)
    joint = torch.cat([with_task(z), action], -1)
    mean, log_std = run_mlp(state, "_pi", with_task(z)).chunk(2, -1)
    log_std = -10 + 6 * (log_std.tanh() + 1)
    if task is not None:
        mask = state["_action_masks"][task]
        mean, log_std, noise = mean * mask, log_std * mask, noise * mask
    return {
        "encoder": z,
        "dynamics": run_mlp(state, "_dynamics", joint, simplex=True),
        "reward": run_mlp(state, "_reward", joint),
        "q": torch.stack([run_mlp(state, "_Qs.params", joint, member=n) for n in range(CRITICS)]),
        "target": torch.stack([run_mlp(state, "_target_Qs_params", joint, member=n) for n in range(CRITICS)]),
        "policy": (mean + noise * log_std.exp()).tanh(),
    }


def our_outputs(algorithm, obs, action, noise, task):
    model = algorithm.model
    z = model.encode(obs, task)
    joint = model.joint(z, action, task)
    return {
        "encoder": z,
        "dynamics": model.dynamics(joint),
        "reward": model.reward(joint),
        "q": model.critics(joint),
        "target": algorithm.targets(joint),
        "policy": model.act(z, noise, task).action,
    }


def import_checkpoint(capsys, place, state, *words, recipe="dmc-tdmpc2"):
    torch.save({"model": state}, place / "tdmpc2.pt")
    words = ["import", str(place / "tdmpc2.pt"), "--recipe", recipe, *words]
    code = main([*words, f"run.runs_dir={place}", "run.name=brought", *SMOKE])
    return code, capsys.readouterr()


CASES = {
    "single": ({}, "pendulum-swingup"),
    "episodic": ({"episodic": True}, "pendulum-swingup"),
    "several": ({"features": 8, "actions": (1, 2), "task_dim": 64}, "pendulum-swingup,cup-catch"),
}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_imported_checkpoint_gives_equal_outputs(capsys, tmp_path, case, older):
    options, tasks = CASES[case]
    state = upstream(**options)
    code, told = import_checkpoint(capsys, tmp_path, as_older(state) if older else state, f"task={tasks}")
    assert code == 0, told.err
    run = tmp_path / "brought"
    algorithm = load_algorithm(run, load_recipe(run))
    generator = torch.Generator().manual_seed(9)
    actions = max(options.get("actions", (1,)))
    obs, action, noise = (
        torch.randn(5, n, generator=generator) for n in (options.get("features", 3), actions, actions)
    )
    task = torch.tensor([0, 1, 1, 0, 1]) if case == "several" else None
    theirs = upstream_outputs(state, obs, action, noise, task)
    with torch.no_grad():
        for name, x in our_outputs(algorithm, obs, action, noise, task).items():
            torch.testing.assert_close(
                x, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_imported_checkpoint_evaluates_and_trains_on(capsys, tmp_path):
    code, told = import_checkpoint(capsys, tmp_path, upstream(), "task=pendulum-swingup")
    assert code == 0, told.err
    run = tmp_path / "brought"
    assert main(["eval", str(run), "--episodes", "2", "--json"]) == 0
    assert math.isfinite(json.loads(capsys.readouterr().out)["return_mean"])
    before = load_algorithm(run, load_recipe(run)).model.state_dict()
    assert main(["resume", str(run)]) == 0
    trained = load_algorithm(run, load_recipe(run))
    assert trained.updates == 16
    assert not torch.equal(trained.model.state_dict()["dynamics.0.weight"], before["dynamics.0.weight"])


def test_imported_agent_acts_itself_instead_of_randomly(capsys, tmp_path):
    import_checkpoint(capsys, tmp_path, upstream(), "task=pendulum-swingup")
    assert load_recipe(tmp_path / "brought").algo.seed_policy == "agent"


@pytest.mark.parametrize(
    ("options", "words", "told"),
    [
        ({}, ["task=pendulum-swingup", "--algo.model.width=24"], "or use model-size=1"),
        ({}, ["task=walker-run"], "was trained with 3 observation and 1 action features"),
        ({}, ["task=pendulum-swingup,cup-catch"], "is for 1 task, but the recipe has 2"),
        (CASES["several"][0], ["task=cup-catch,pendulum-swingup"], "task 1 of"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(capsys, tmp_path, options, words, told):
    code, ended = import_checkpoint(capsys, tmp_path, upstream(**options), *words)
    assert code == 2
    assert told in ended.err


def test_checkpoint_with_recipe_of_another_algorithm_is_refused(capsys, tmp_path):
    torch.save({"model": upstream()}, tmp_path / "tdmpc2.pt")
    assert main(["import", str(tmp_path / "tdmpc2.pt"), "--recipe", "gym-ppo"]) == 2
    assert "Use --recipe dmc-tdmpc2 task=NAME" in capsys.readouterr().err


def test_checkpoint_of_thirty_tasks_names_the_set_of_the_reference(tmp_path):
    torch.save({"model": upstream(24, (6,) * 30, 64)}, tmp_path / "mt30.pt")
    _, settings, _ = read_weights(tmp_path / "mt30.pt")
    assert settings["task"] == {"tasks": ["mt30"]}
    assert settings["algo"]["model"]["task_embedding"] == 64
