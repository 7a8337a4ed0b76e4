"""The card of a published run (README.md) from the data of its report, and the report itself."""

import json
from typing import Any

import yaml

from lockstep import __version__
from lockstep.tools.report.run_data import ReportedRun
from lockstep.tools.report.sections import headline, main_metric
from lockstep.tools.report.series import format_number

SETTINGS = ("run.seed", "run.reduction", "run.lanes", "run.precision", "algo.learning_rate", "algo.batch_size")
MAX_CHARS = 100


def write_card(run: ReportedRun, repo: str, entry: str, segments: str, proof: Any) -> str:
    """Return the card as markdown.

    Args:
        run: Data of the report.
        repo: USER/NAME of the repository.
        entry: Hash of the newest entry of the chain; empty without a chain.
        segments: What part of the run can be trained again, as a sentence.
        proof: Record of `lockstep prove --json`. None: there is none.
    """
    task = str(run.settings.get("task.id") or run.settings.get("task.tasks") or run.recipe)
    name, best, deviation = headline(run.log.best)
    rows = {
        "recipe": run.recipe,
        "task": task,
        "samples": format_number(run.log.samples),
        f"best {name or 'evaluation'}": f"{best} {deviation}".strip(),
        f"last {name or 'evaluation'}": " ".join(headline(run.log.last)[1:]).strip(),
        **{key: run.settings[key] for key in SETTINGS if key in run.settings},
        "Lockstep": run.version,
    }
    table = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items())
    lines = [
        f"---\n{_metadata(run, task)}---\n",
        f"# {_cell(repo)}\n",
        f"Trained with Lockstep {__version__} (`pip install lockstep-rl`).\n",
        f"| | |\n| --- | --- |\n{table}\n",
        "```sh",
        f"lockstep pull {repo}",
        f"lockstep play runs/{repo.partition('/')[2]}",
        f"lockstep verify runs/{repo.partition('/')[2]}",
        "```\n",
        "## Verification\n",
        f"Newest entry of the hash chain: `{entry}`. {segments}\n" if entry else "The run has no hash chain.\n",
    ]
    if isinstance(proof, dict):
        lines.append(
            f"`lockstep prove` of {_cell(proof.get('recipe'))}: {_cell(proof.get('verdict'))} (`proof.json`).\n"
        )
    lines.append("`report.html` has curves, evaluations and all settings.\n")
    return "\n".join(lines)


def _metadata(run: ReportedRun, task: str) -> str:
    """Return the YAML header by which the Hub lists and finds a model."""
    values: dict[str, Any] = {
        "library_name": "lockstep",
        "tags": ["reinforcement-learning", "lockstep", run.recipe, _cell(task)],
    }
    if (main := main_metric(run.log.best)) is not None:
        dataset = {"name": _cell(task), "type": _cell(task)}
        metric = {"type": main[0].replace(" ", "_"), "value": json.loads(json.dumps(main[1]))}
        task_type = {"type": "reinforcement-learning"}
        values["model-index"] = [
            {"name": run.recipe, "results": [{"task": task_type, "dataset": dataset, "metrics": [metric]}]}
        ]
    return str(yaml.safe_dump(values, sort_keys=False))


def _cell(value: object) -> str:
    """Return a value as text that cannot end a table cell or begin markup."""
    text = " ".join(str(value).split())[:MAX_CHARS]
    return "".join(f"&#{ord(character)};" if character in "|<>[]`" else character for character in text)
