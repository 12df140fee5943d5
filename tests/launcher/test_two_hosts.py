"""Two hosts (network namespaces with a virtual cable) train together, started by the script that `launch` prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.launcher.launch_script import Resources, build_launch_script
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import Recipe
from tests.conftest import exhaustive
from tests.training.training_cases import metrics, recipe, trace, train

ADDRESSES = ("10.79.0.1", "10.79.0.2")


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces. In both the host's own name resolves to loopback, as is common."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (Debian: iproute2)")
    names = (f"mw-a-{os.getpid()}", f"mw-b-{os.getpid()}")
    try:
        for name in names:
            made = ip("netns", "add", name)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@contextmanager
def on(host: str, command: list[str], **environment: object) -> Iterator[subprocess.Popen[str]]:
    """A running command on a host, in a process group that is killed afterwards."""
    known = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    process = subprocess.Popen(
        ["ip", "netns", "exec", host, *command],
        env=known | {"OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in environment.items()},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def written(wanted: Recipe, path: Path) -> Path:
    path.write_text(wanted.to_toml())
    return path


@pytest.mark.parametrize(
    ("layout", "per_host"),
    exhaustive(("dp2 zero1 tp2 fp32", 2), ("dp2 zero3 tp4 fp32", 4)),
)
def test_two_hosts_match_one_host_bit_for_bit(layout, per_host, hosts, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for place in (one, two):
        place.mkdir()
    changes = {"train_steps": 3, "model_kv_heads": 4}
    with LocalRanks(2 * per_host) as ranks:
        ranks.run(train, recipe(one, layout, **changes).to_toml())
    path = written(recipe(two, layout, **changes), two / "recipe.toml")
    made = build_launch_script("torchrun", path, resources=Resources(nodes=2, restarts=0))
    assert (made.devices_per_node, made.warnings) == (per_host, ())
    with ExitStack() as stack:
        command = ["bash", "-c", made.script]
        started = [stack.enter_context(on(host, command, MASTER_ADDR=ADDRESSES[0])) for host in hosts]
        ended = [process.communicate(timeout=200) for process in started]
        assert [process.returncode for process in started] == [0, 0], ended
    assert trace(two) == trace(one) and len(metrics(two)) >= 3


def test_disconnected_host_is_named_within_timeout(hosts, tmp_path):
    wanted = recipe(tmp_path, "dp2 fp32", train_steps=10**6, train_log_every=1, run_collective_timeout=12.0)
    path = written(wanted, tmp_path / "recipe.toml")
    command = [sys.executable, "-m", "meshwright", "train", str(path)]
    meeting = {
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": 29555,
    }
    directory = RunDirectory(wanted.run_directory)
    with on(hosts[0], command, RANK=0, **meeting) as here, on(hosts[1], command, RANK=1, **meeting):
        deadline = time.monotonic() + 120
        while not directory.read_last_step():
            assert here.poll() is None and time.monotonic() < deadline, here.communicate()
            time.sleep(0.05)
        ip("-n", hosts[1], "link", "set", "eth0", "down")  # the cable, not the processes: no connection is closed
        cut = time.monotonic()
        _, errors = here.communicate(timeout=60)
        seconds = time.monotonic() - cut
        ip("-n", hosts[1], "link", "set", "eth0", "up")
    assert here.returncode == 3, errors
    # Here the records of both hosts can be read: both are in the same call, so the link is at fault. Rank 1 gives up in
    # the same second; if it has ended before rank 0 reports, its end is seen here, as both hosts are one machine.
    alone, both, ended = (
        r"rank 0 had no answer from rank 1 in \S+ \(\w+ over axis (data|world)",
        r"the network carries no data between them",
        r"rank 1 has not completed call \d+ .*; rank 0 has been waiting for 1\d\.\d s; it has died",
    )
    assert re.search(f"{alone}|{both}|{ended}", errors), errors
    assert seconds < 40 and json.loads((wanted.run_directory / "ranks.json").read_text()).keys() == {"0", "1"}
