"""Invalid directory names and path traversal are rejected with a message before anything is written."""

import pytest
import yaml

from lockstep.checkpoint.format_version import FORMAT
from lockstep.cli import main
from lockstep.config import NAME_BYTES, ConfigError, RunConfig, apply_overrides, read_yaml
from lockstep.inference import load_recipe
from lockstep.recipes.snake_ppo import SnakePPO

NAMES = {
    "a path": ("a/b", "is a path and not a name"),
    "a path from the root": ("/tmp/project", "is a path and not a name"),
    "a path up": ("../project", "is a path and not a name"),
    "the directory above": ("..", "is a path and not a name"),
    "the directory itself": (".", "is a path and not a name"),
    "a path of Windows": ("..\\project", "is a path and not a name"),
    "a zero byte": ("a\0b", "unprintable characters"),
    "half a letter": ("a\ud800b", "unprintable characters"),
    "a byte that is no letter": ("a\udcffb", "unprintable characters"),
    "a newline": ("a\nb", "unprintable characters"),
    "an escape": ("a\x1b[2Jb", "unprintable characters"),
    "an override": ("a\u202eb", "unprintable characters"),
    "300 letters": ("a" * 300, "has 300 bytes, more than the maximum of 200"),
    "201 bytes": ("é" * 100 + "a", "has 201 bytes"),
}


@pytest.mark.parametrize(("name", "sentence"), NAMES.values(), ids=NAMES.keys())
def test_invalid_run_name_is_refused(tmp_path, capsys, monkeypatch, name, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        RunConfig(name=name)
    with pytest.raises(ConfigError, match=sentence):
        apply_overrides(SnakePPO(), {"run.name": name})
    (tmp_path / "foreign.yaml").write_text(yaml.safe_dump({"run": {"name": name}}))
    assert main(["train", "snake-ppo", "--smoke", "--config", "foreign.yaml"]) == 2
    assert sentence in capsys.readouterr().err
    for words in (["run.name=" + name], ["--run.name", name]):
        try:
            code = main(["train", "snake-ppo", "--smoke", *words])
        except SystemExit as exit:
            code = exit.code
        assert code == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert sentence in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["foreign.yaml"]


@pytest.mark.parametrize("name", ["a", "run-1", "空白", "é" * 100, "a b", "[bold]", "-n", "..."])
def test_valid_run_name_is_accepted(name):
    assert RunConfig(name=name).name == name
    assert len(name.encode()) <= NAME_BYTES


@pytest.mark.parametrize("text", ['"a\\0b"', '"\\ud800"', '"\\e[2J"', "0x" + "f" * 75_000])
@pytest.mark.parametrize("setting", ["run: {{runs_dir: {}}}", "run: {{name: {}}}", "run: {{device: {}}}", "recipe: {}"])
def test_unprintable_text_settings_are_refused(tmp_path, setting, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(
        f"format: {FORMAT}\n" + ("recipe: snake-ppo\n" if "recipe" not in setting else "") + setting.format(text)
    )
    with pytest.raises(ConfigError):
        apply_overrides(SnakePPO(), read_yaml(tmp_path / "run" / "config.yaml"))
    if "device" in setting or "recipe" in setting:  # load_recipe replaces the other settings by the run's location
        with pytest.raises(ConfigError):
            load_recipe(tmp_path / "run")
    assert main(["ls", str(tmp_path)]) == 0


LONG = "a" * 300
READERS = {
    "eval": ["eval", LONG],
    "resume": ["resume", LONG],
    "play": ["play", LONG],
    "export": ["export", LONG, "--to", "onnx"],
    "report": ["report", LONG],
    "report to": ["report", "run", "--out", LONG],
    "reference": ["report", "run", "--reference", LONG],
    "proof": ["report", "run", "--proof", LONG],
    "gif": ["report", "run", "--gif", LONG],
    "import": ["import", LONG],
    "train": ["train", f"{LONG}.py"],
    "config": ["train", "snake-ppo", "--config", LONG],
    "init-from": ["train", "snake-ppo", "--smoke", "--init-from", LONG],
    "resume-from": ["train", "snake-ppo", "--resume", LONG],
    "directory": ["train", "snake-ppo", "--smoke", f"run.runs_dir={LONG}"],
    "plan": ["plan", "snake-ppo", "--measured", LONG],
    "backtest": ["backtest", f"{LONG}.py"],
    "benchmark": ["benchmark", "classic", "--plot", "--out", LONG],
    "sweep": ["sweep", LONG],
    "space": ["sweep", "gym-ppo", "--space", LONG],
    "audit": ["audit", LONG],
    "opponents": ["eval", "run", "--opponents", LONG],
}


@pytest.mark.parametrize("words", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("kind", ["300 letters", "a byte that is no letter"])
def test_command_with_invalid_path_prints_an_error_without_traceback(tmp_path, monkeypatch, capsys, words, kind):
    monkeypatch.chdir(tmp_path)
    if kind != "300 letters":
        words = [word.replace(LONG, "a\udcffb") for word in words]
    try:
        code = main(words)
    except SystemExit as exit:
        code = exit.code
    assert code in (1, 2)
    said = capsys.readouterr().err
    assert said
    assert "Traceback" not in said


def test_ls_of_an_invalid_path_does_not_crash(capsys):
    assert main(["ls", LONG]) in (0, 2)
