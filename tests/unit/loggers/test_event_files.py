"""Names of TensorBoard event files after a resume."""

from lockstep.loggers.run_logger import age_event_files

PREFIX = "events.out.tfevents."


def age(directory, names, now):
    for name in names:
        (directory / f"{PREFIX}{name}").touch()
    age_event_files(directory, now)
    return sorted(path.name.removeprefix(PREFIX) for path in directory.iterdir())


def test_event_files_of_the_same_second_are_renamed_in_order(tmp_path):
    assert age(tmp_path, ["100.host.1.0", "200.host.2.0"], 200) == ["0000000000.host.1.0", "0000000001.host.2.0"]


def test_event_files_of_earlier_seconds_keep_their_names(tmp_path):
    assert age(tmp_path, ["100.host.1.0"], 200) == ["100.host.1.0"]


def test_event_files_with_foreign_names_are_left_alone(tmp_path):
    assert age(tmp_path, ["100.host.1.0", "x.host.1.0", "²"], 100) == ["0000000000.host.1.0", "x.host.1.0", "²"]
