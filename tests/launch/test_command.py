"""Tests of the options of `armillary launch` and of their errors."""

import asyncio
import re
import sys

import pytest

import armillary
from armillary.launch import ExitCode, _command
from tests.command import run_command


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return tmp_path


@pytest.fixture
def jobs(monkeypatch):
    """Returns a list of the jobs that would have been run."""
    jobs = []
    monkeypatch.setattr(_command, "run_job", lambda job: jobs.append(job) or 0)
    return jobs


def count_workers(job):
    return len(asyncio.run(job.machines.reserve(print))[0])


def test_defaults(jobs):
    assert run_command(["launch", "train.py"]) == 0
    (job,) = jobs
    assert (count_workers(job), job.max_restarts, job.logs) == (1, 10, {})
    assert not job.has_evaluator
    assert (job.pause_seconds, job.grace_seconds) == (1.0, 30.0)
    assert job.machines.devices.virtual_cpus is None


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["train.py"], ["train.py"]),
        (["train.py", "--workers", "7", "-m", "x"],) * 2,
        (["--", "train.py", "--", "a"], ["train.py", "--", "a"]),
        (["-m", "train", "--workers", "7"],) * 2,
    ],
)
def test_arguments_after_the_script_are_the_scripts(jobs, words, arguments):
    assert run_command(["launch", "--workers", "3", *words]) == 0
    assert jobs[0].arguments == arguments
    assert count_workers(jobs[0]) == 3


def test_all_options_arrive(jobs, folder, monkeypatch):
    monkeypatch.setattr(_command, "find_gpus", lambda environment: list("0123456"))
    options = "--workers 2 --devices-per-worker 1 --max-restarts 4 --pause-seconds 0.5"
    options += " --grace-seconds 6 --log-dir logs --evaluator train.py"
    run_command(["launch", *options.split()])
    (job,) = jobs
    assert (count_workers(job), job.has_evaluator, job.max_restarts) == (2, True, 4)
    assert (job.pause_seconds, job.grace_seconds) == (0.5, 6.0)
    # The evaluator has devices and a log of its own.
    assert job.machines.devices.gpus == (("0",), ("1",), ("2",))
    assert list(job.logs) == ["worker 0", "worker 1", "evaluator"]
    for log in job.logs.values():
        log.close()
    assert {path.name for path in (folder / "logs").iterdir()} == {
        "worker_0.log",
        "worker_1.log",
        "evaluator.log",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 0 train.py", "`--workers` is 0, but it must be a positive integer"),
        ("--workers two train.py", "--workers: invalid workers value: 'two'"),
        ("--workers 1:2:3 train.py", "--workers: invalid workers value: '1:2:3'"),
        (
            "--workers 4:2 train.py",
            "'4:2', but MIN must not be larger than MAX.",
        ),
        (
            "--workers 0:2 train.py",
            "`--workers` is 0, but it must be a positive integer",
        ),
        ("--workers -1 train.py", "`--workers` is -1, but it must be a positive integ"),
        ("--wait-seconds -1 train.py", "`--wait-seconds` is -1.0, but it must"),
        (
            "--ray x:1 --evaluator train.py",
            "`--evaluator` is given with `--ray`, w",
        ),
        *[
            (f"--ray {address} train.py", f"`--ray` is '{address}', but the launcher c")
            for address in ("auto", "127.0.0.1:1")
        ],
        ("--worker 2 train.py", "'--worker' is not an option of this command. Use"),
        ("--devices-per-worker 0 train.py", "`--devices-per-worker` is 0, but"),
        ("--max-restarts -1 train.py", "`--max-restarts` is -1, but it must be"),
        ("--pause-seconds -1 train.py", "`--pause-seconds` is -1.0, but it must be"),
        (
            "--grace-seconds inf train.py",
            "`--grace-seconds` is inf, but it must be a f",
        ),
        ("", "the script is missing, but it must follow the options. Use"),
        ("-m", "the script is missing, but it must follow the options. Use"),
        (
            "--log-dir train.py train.py",
            "is 'train.py', but .*File exists.* Use a folder",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(jobs, capsys, words, message):
    with pytest.raises(SystemExit) as raised:
        run_command(["launch", *words.split()])
    assert raised.value.code == ExitCode.USAGE
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert jobs == []


@pytest.mark.parametrize("name", ["TF_CONFIG", "platform"])
def test_a_worker_and_another_system_are_refused(monkeypatch, jobs, name, capsys):
    if name == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        monkeypatch.setenv(name, "{}")
    with pytest.raises(SystemExit):
        run_command(["launch", "train.py"])
    expected = {
        "TF_CONFIG": "is '{}', so",
        "platform": "is 'darwin', but `armillary launch`",
    }
    assert expected[name] in capsys.readouterr().err
    assert jobs == []


def test_a_job_that_this_machine_refuses_leaves_no_logs(folder, monkeypatch, capsys):
    monkeypatch.setattr(_command, "find_gpus", lambda environment: ["0"])
    with pytest.raises(SystemExit):
        run_command(["launch", "--workers", "2", "--log-dir", "logs", "train.py"])
    assert "but this machine offers 1 GPUs (0)" in capsys.readouterr().err
    assert not (folder / "logs").exists()


def test_an_empty_description_of_a_cluster_is_none(jobs, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")
    assert run_command(["launch", "train.py"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ([], ExitCode.OK, "launch start the workers"),
        (["--bogus"], ExitCode.USAGE, "'--bogus' is not an option of this command. "),
        (["runs", "a", "b"], ExitCode.USAGE, "'b' is left over, because this command"),
        (["--version"], ExitCode.OK, f"armillary {armillary.__version__}"),
    ],
)
def test_without_a_command_there_is_help(capsys, words, code, expected):
    try:
        found = run_command(words)
    except SystemExit as ended:
        found = ended.code
    assert found == code
    # Releases of Python set the columns differently.
    assert expected in " ".join("".join(capsys.readouterr()).split())
