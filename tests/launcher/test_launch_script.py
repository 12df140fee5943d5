"""Launch scripts start the right ranks on each host, restart after lost ranks, and save on a signal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.launcher import hosts
from meshwright.launcher.hosts import find_address_towards, find_interface, is_this_host
from meshwright.launcher.launch_script import Resources, build_launch_script, split_over_hosts
from meshwright.launcher.rendezvous import read_rendezvous_info, warn_of_tensor_across_hosts
from meshwright.layout import Layout
from meshwright.monitoring.run_directory import RunDirectory
from tests.forked_commands import ForkedPython
from tests.rank_processes import read_ranks

SHELLCHECK = shutil.which("shellcheck")
KINDS = ("torchrun", "slurm")


@pytest.mark.parametrize(
    ("layout", "nodes", "devices", "hosts"),
    [
        ("dp2", None, None, (1, 2)),
        ("dp2 tp8", None, None, (2, 8)),
        ("dp2 tp8", 4, None, (4, 4)),
        ("dp2 tp8", None, 16, (1, 16)),
        ("dp3 tp4", 3, 4, (3, 4)),
        ("dp3 tp4", 2, None, (2, 6)),
    ],
)
def test_hosts_times_devices_equal_ranks_of_layout(layout, nodes, devices, hosts):
    assert split_over_hosts(Layout.parse(layout), nodes, devices) == hosts


@pytest.mark.parametrize(
    ("layout", "nodes", "devices", "have"),
    [
        ("dp2 tp8", 3, None, "3 hosts;"),
        ("dp2 tp8", None, 6, "hosts of 6 devices;"),
        ("dp2 tp8", 3, 8, "3 hosts of 8 devices;"),
        ("dp2 tp8", 1, 1, "1 host of 1 device;"),
        ("dp2", 4, None, "4 hosts;"),
        ("dp17", None, None, "hosts of 8 devices;"),
    ],
)
def test_impossible_host_counts_are_refused_with_valid_ones(layout, nodes, devices, have):
    with pytest.raises(UserError, match=re.escape(f"does not fill {have}")) as caught:
        split_over_hosts(Layout.parse(layout), nodes, devices)
    would = re.findall(r"--nodes (\d+) --devices-per-node (\d+)", str(caught.value))
    assert would
    for pair in would:
        assert split_over_hosts(Layout.parse(layout), *map(int, pair)) == tuple(map(int, pair))


# --- ranks follow the links


@pytest.mark.parametrize(
    ("layout", "per_host", "inside"),
    [
        ("tp2 dp8", 8, None),
        ("tp8 dp2", 8, None),
        ("tp4 dp3", 4, None),
        ("dp16", 1, None),
        ("tp8 dp2", 4, "tp4 would not"),
        ("tp4 dp3", 6, "tp2 would not"),
        ("tp3 dp8", 8, "without tp it would not"),
        ("tp2", 1, "without tp it would not"),
    ],
)
def test_tensor_parallel_groups_across_hosts_are_warned_of(layout, per_host, inside):
    warning = warn_of_tensor_across_hosts(Layout.parse(layout), per_host)
    assert (warning is None) == (inside is None) and (inside or "") in (warning or "")


def test_ranks_per_host_follow_torchrun_or_slurm():
    def per_host(environment):
        return read_rendezvous_info("file:///x", environment).host_ranks

    started = {"RANK": "3", "WORLD_SIZE": "16"}
    srun = {"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "SLURM_LOCALID": "3", "SLURM_TASKS_PER_NODE": "8(x2)"}
    assert [per_host(started | {"LOCAL_WORLD_SIZE": "8"}), per_host(srun), per_host(started)] == [8, 8, None]
    assert per_host(srun | {"SLURM_STEP_TASKS_PER_NODE": "4(x4)"}) == 4
    assert per_host(srun | {"SLURM_TASKS_PER_NODE": "8(x1),4(x2)"}) is None  # not equally many
    assert per_host(started | srun | {"WORLD_SIZE": "32"}) is None  # srun started something else


def test_interface_is_found_by_its_address():
    assert find_interface("127.0.0.1") in ("lo", "lo0") and find_interface("127.0.1.1") == find_interface("127.0.0.1")
    assert find_interface("198.51.100.7") is None
    assert find_address_towards("localhost") in ("127.0.0.1", "::1")
    assert is_this_host("localhost") and not is_this_host("198.51.100.7")
    with pytest.raises(UserError, match='"no.such.host.invalid" cannot be resolved'):
        find_address_towards("no.such.host.invalid")


def test_rendezvous_host_resolving_to_loopback_finds_its_own_address(monkeypatch, capsys):
    """As on Debian, where /etc/hosts maps the host's name to 127.0.1.1."""
    ways = {"node1": "127.0.1.1", "node1.cluster": "127.0.1.1", "localhost": "127.0.0.1", hosts._ELSEWHERE: "192.0.2.5"}
    monkeypatch.setattr(hosts, "find_address_towards", lambda host: ways.get(host, host))
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "node1")
    for name in ("node1", "node1.cluster"):
        assert hosts.main([name]) == 0 and capsys.readouterr().out == "192.0.2.5\n"
    for loopback in ("localhost", "127.0.0.1"):  # elsewhere they mean another host
        assert hosts.main([loopback]) == 2 and "is a loopback address of this host" in capsys.readouterr().err
    ways[hosts._ELSEWHERE] = "127.0.0.1"  # no default route
    assert hosts.main(["node1"]) == 2


# --- what is printed


@pytest.fixture
def recipe(tiny_recipe: Path, tmp_path: Path, monkeypatch) -> Path:
    """A recipe in the current directory, on a short text."""
    (tmp_path / "corpus.txt").write_text("".join(f"Run {n} is good if it can go on.\n\n" for n in range(600)))
    text = tiny_recipe.read_text().replace('"stdlib"', '"corpus.txt"\ncache = "cache"')
    tiny_recipe.write_text(text.replace("seed = 7", 'seed = 7\ndevice = "cpu"').replace("steps = 4", "steps = 50"))
    monkeypatch.chdir(tmp_path)
    return tiny_recipe


def with_python(script: str, path: Path) -> str:
    """The script with another program instead of Python."""
    changed, count = re.subn(r"^python=.*$", f"python={path}", script, flags=re.MULTILINE)
    assert count == 1
    return changed


ODD = ["plain", "with space", "it's", "$HOME;exit 7", "-dash", "new\nline", "@NODES@", "percent%j"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", ODD)
def test_unusual_names_are_quoted_as_one_word(kind, odd, recipe, tmp_path, monkeypatch):
    directory = tmp_path / odd
    directory.mkdir()
    monkeypatch.chdir(directory)
    shutil.copy(recipe, f"{odd}.toml")
    options = {"sbatch": ["--partition=gpu"], "time": "1-0:30"} if kind == "slurm" else {}
    overrides = ["layout=dp2 tp2", f"data.cache={json.dumps(odd)}"]
    made = build_launch_script(kind, f"{odd}.toml", overrides, Resources(nodes=2, cpus_per_device=3, **options))
    if SHELLCHECK:
        checked = subprocess.run(
            [SHELLCHECK, "-e", "SC2016", "-s", "bash", "-"], input=made.script, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout

    # The substitute for Python, srun and torchrun writes its arguments.
    words = tmp_path / "words"
    stand_in = tmp_path / "srun"
    stand_in.write_text(
        f'#!/bin/bash\n[ "$2" != meshwright.launcher.hosts ] || exit 0\npwd > {words}\nprintf "%s\\0" "$@" >> {words}\n'
    )
    stand_in.chmod(0o755)
    script = with_python(made.script, stand_in)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "localhost"}
    subprocess.run(["bash", "-c", script], cwd="/", env=environment, check=True)
    where, _, given = words.read_text().rpartition("\n" if "\n" not in odd else f"{odd}\n")
    called = given.split("\0")[:-1]
    first = called.index("meshwright")
    path = f"./{odd}.toml" if odd.startswith("-") else f"{odd}.toml"
    assert called[first + 1 :] == ["train", path, *overrides]
    assert (where + (odd if "\n" in odd else "")) == str(directory)
    assert ("--nproc-per-node" in called) == (kind == "torchrun") and ("--ntasks=4" in called) == (kind == "slurm")
    directives = [line for line in made.script.splitlines() if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=[A-Za-z0-9_.:@%-]+)?", line) for line in directives)


def test_slurm_script_requests_resources_of_recipe(recipe):
    made = build_launch_script(
        "slurm", recipe.name, ["layout=dp4 tp4", "train.batch=16"], Resources(nodes=4, time="24:00:00")
    )
    directives = re.findall("^#SBATCH (.*)$", made.script, re.MULTILINE)
    asked = {"--nodes=4", "--ntasks-per-node=4", "--time=24:00:00", "--requeue", "--output=tiny-%j.out"}
    assert asked <= set(directives) and not any("gpu" in line for line in directives)  # run.device = "cpu"
    made = build_launch_script("slurm", recipe.name, ["layout=dp4 tp4", "train.batch=16", "run.device=auto"])
    assert (made.nodes, made.devices_per_node) == (2, 8) and "#SBATCH --gpus-per-node=8\n" in made.script


def test_launch_errors_are_one_line(recipe, command_line):
    mistakes = {
        "--torchrun or --slurm": [],
        "does not fill 3 hosts": ["--torchrun", "layout=dp2", "--nodes", 3],
        "--time needs --slurm": ["--torchrun", "--time", "1:00"],
        "--sbatch needs --slurm": ["--torchrun", "--sbatch=-p gpu"],
        '--time "soon"': ["--slurm", "--time", "soon"],
        "choose what starts the ranks": ["--torchrun", "--slurm"],
        "the layout sets hosts and ranks": ["--slurm", "--sbatch=--nodes=7"],
        "is not an option of sbatch": ["--slurm", "--sbatch", "partition=gpu\nrm -r"],
        "batch 4 is not a multiple": ["--slurm", "layout=dp3"],
    }
    for reason, arguments in mistakes.items():
        outcome = command_line("launch", recipe.name, *arguments)
        assert (outcome.code, outcome.output, outcome.errors.count("\n")) == (2, "", 1), outcome.errors
        assert reason in outcome.errors
    outcome = command_line("launch", recipe.name, "--slurm", "layout=dp2 tp2", "--devices-per-node", 1, "--json")
    answer = json.loads(outcome.output)
    assert answer["schema"] == 1 and answer["script"].startswith("#!/usr/bin/env bash\n")
    assert outcome.errors == f"meshwright: warning: {answer['warnings'][0]}\n"


# --- what happens then

SRUN = """#!{python}
# As srun: starts the tasks, passes signals on, answers with the highest exit code.
import os, signal, subprocess, sys
words = sys.argv[1:]
ranks = int(next(word for word in words if word.startswith("--ntasks=")).partition("=")[2])
command = words[next(at for at, word in enumerate(words) if not word.startswith("--")):]
count = len(open("starts", "a+").read()) if not open("starts", "a").write("x") else 0
tasks = []
signal.signal(signal.SIGTERM, lambda number, frame: [task.send_signal(number) for task in tasks])
for rank in range(ranks):
    place = dict(SLURM_PROCID=rank, SLURM_NTASKS=ranks, SLURM_LOCALID=rank, SLURM_JOB_NODELIST="localhost",
                 SLURM_STEP_ID=count, SLURM_TASKS_PER_NODE=ranks)
    tasks.append(subprocess.Popen(command, env=os.environ | {{key: str(value) for key, value in place.items()}}))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch) -> Path:
    """srun and scontrol, and a Python that starts without loading site packages."""
    for name, text in {
        "srun": SRUN.format(python=sys.executable),
        "scontrol": '#!/bin/sh\necho "$@" > requeued\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", str(os.getpid()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@contextmanager
def started(script: str, **options):
    """A running script in its own process group, which is killed afterwards."""
    process = subprocess.Popen(
        ["bash", "-c", script], start_new_session=True, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def wait_for(condition, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def slurm_with(recipe: Path, cluster: Path, rank: str) -> str:
    """The SLURM script of two ranks, each of which is the shell script `rank` instead; $1 is the count of starts."""
    (cluster / "python").write_text(f'#!/bin/bash\nset -- "$(stat -c %s starts)"\n{rank}\n')
    (cluster / "python").chmod(0o755)
    made = build_launch_script("slurm", recipe.name, ["layout=dp2"], Resources(restarts=2))
    return with_python(made.script, cluster / "python")


@pytest.mark.parametrize(
    ("rank", "code", "starts"),
    [
        ("exit 0", 0, 1),
        ("exit 2", 2, 1),  # a user error is not retried
        ("exit 143", 143, 1),  # the ranks saved on SIGTERM
        ("[ $1 = 2 ] || exit 3", 0, 2),
        ("[ $1 = 3 ] || kill -KILL $$", 0, 3),
        ("exit 3", 3, 3),
    ],
)
def test_slurm_script_restarts_only_lost_ranks(rank, code, starts, recipe, cluster):
    ended = subprocess.run(
        ["bash", "-c", slurm_with(recipe, cluster, rank)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, (cluster / "starts").stat().st_size) == (code, starts), ended.stderr
    assert not (cluster / "requeued").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_script_saves_before_time_limit_and_requeues(number, recipe, cluster):
    saves = 'trap "sleep 0.3; touch saved-$SLURM_PROCID; exit 143" TERM; touch up-$SLURM_PROCID'
    saves += "\nwhile :; do sleep 0.05; done"
    with started(slurm_with(recipe, cluster, saves)) as job:
        wait_for(lambda: all((cluster / f"up-{rank}").exists() for rank in range(2)))
        job.send_signal(number)
        code = job.wait(timeout=20)
    assert all((cluster / f"saved-{rank}").exists() for rank in range(2))
    requeued = cluster / "requeued"
    if number == signal.SIGUSR1:
        assert requeued.read_text() == f"requeue {os.getpid()}\n"
    else:  # cancelled: it must not come back
        assert code == 143 and not requeued.exists()
    assert (cluster / "starts").stat().st_size == 1


@pytest.fixture
def python(tmp_path: Path) -> Iterator[ForkedPython]:
    (directory := tmp_path / "forked").mkdir()
    with ForkedPython(directory) as program:
        yield program


def test_launch_scripts_train_and_torchrun_survives_killed_rank(recipe, cluster, python):
    """Two runs that must give equal results: two ranks by the SLURM script, and by torchrun's with a killed rank."""
    overrides = ["layout=dp2 zero1 fp32", "checkpoint.every=10"]
    slurm = build_launch_script("slurm", recipe.name, [*overrides, "run.name=slurm"])
    torchrun = build_launch_script("torchrun", recipe.name, [*overrides, "run.name=torchrun"], Resources(restarts=1))
    directory = RunDirectory("runs/torchrun")
    with started(with_python(slurm.script, python.path)) as undisturbed:
        assert undisturbed.wait(timeout=120) == 0, undisturbed.stderr.read()
    with started(with_python(torchrun.script, python.path)) as disturbed:
        wait_for(lambda: (directory.read_last_step() or 0) >= 20)
        before = read_ranks(directory.path)
        os.kill(before[1], signal.SIGKILL)
        _, errors = disturbed.communicate(timeout=120)
        assert disturbed.returncode == 0, errors
    assert re.search(r"resumed from step-0000[1-4]0", errors) and read_ranks(directory.path) != before
    ends = [json.loads(Path(f"runs/{name}/result.json").read_text()) for name in ("slurm", "torchrun")]
    assert ends[0]["step"] == ends[1]["step"] == 50 and ends[0]["loss"] == ends[1]["loss"]
    assert next(Path("runs/torchrun/torchrun").rglob("stderr.log")).stat().st_mode & stat.S_IRUSR


def test_documentation_shows_printed_launch_scripts(repository, monkeypatch):
    page = (repository / "docs" / "launching.md").read_text()
    monkeypatch.setattr(Path, "cwd", lambda: Path("/home/ada/models"))
    monkeypatch.setattr(sys, "executable", "/home/ada/venv/bin/python")
    recipe, overrides = repository / "recipes/quickstart.toml", ["layout=dp8 zero1 tp2 bf16"]
    options = {"torchrun": {}, "slurm": {"time": "24:00:00", "sbatch": ["--partition=gpu"]}}
    for kind in KINDS:
        script = build_launch_script(kind, recipe, overrides, Resources(nodes=2, **options[kind])).script
        assert f"```bash\n{script}```\n" in page.replace("recipes/quickstart.toml", str(recipe))
