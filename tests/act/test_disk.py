"""Swapping to disk: same bits, the space that is taken and given back, and what happens when the disk is full, cannot
be read, writes less than it was given, or when the process is killed.

The faults are real ones: a small tmpfs, /dev/full put in the file's place, a file cut short, a limit on file sizes.
Does not cover: the lanes and the victim queue (test_swap.py), which are the same for every tier; the disk of an
accelerator (tests/accelerator/test_disk.py).
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.act import spill
from delta_runtime.config import Config
from delta_runtime.online.policies import get_policy
from tests.support.bitwise import Snapshot, assert_same_bits
from tests.support.disk_faults import MIB, cut_and_grown, descriptor, disk, replaced, shifted
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.swapping import (
    LAYER_BYTES,
    budget,
    expected_gradient,
    lanes,
    ordinary_run,
    swap_out_a_graph,
    train,
    walled,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ordinary() -> tuple[Snapshot, int]:
    return ordinary_run()


def spiller(folder: Path, **arguments) -> delta.Runtime:
    """A runtime on the plain CPU device that swaps to a file of 64 MiB."""
    settings = {"device": "cpu", "policy": "swap", "spill_dir": str(folder), "disk_budget": "64MiB"}
    return delta.Runtime("100%", **settings | arguments)


# ------------------------------------------------------------------------- budget and bits


@pytest.mark.parametrize("direct", [True, False], ids=["O_DIRECT", "page cache"])
@pytest.mark.parametrize("policy", ["swap", "delta", "capuchin", "auto"])
def test_same_bits_inside_the_wall(ordinary, tmp_path, monkeypatch, policy, direct):
    if not direct:
        monkeypatch.setattr(spill, "_use_direct", lambda descriptor: False)
    snapshot, _ = ordinary
    budget_bytes = budget(ordinary, 0.6)
    runtime = delta.Runtime(budget_bytes, device="cpu", policy=policy, spill_dir=str(tmp_path))
    if runtime.tiers.spill.direct != direct:
        pytest.skip("this file system has no O_DIRECT")
    with walled(budget_bytes + 5 * LAYER_BYTES):  # the snapshots that this test keeps
        inside = train(runtime)
    assert os.listdir(tmp_path) == []
    assert_same_bits(inside, snapshot, policy)
    report = runtime.report()
    assert report.totals.swap_ins + report.totals.rebuilds > 10
    if policy == "swap":
        assert report.totals.drops == 0
        assert disk(runtime)["in"][1] == report.totals.swapped_in_bytes > 10 * MIB
        assert f"disk ({'O_DIRECT' if direct else 'page cache'})" in str(report)
    runtime.close()


def test_what_the_host_has_no_room_for_goes_to_disk(ordinary, tmp_path):
    snapshot, _ = ordinary
    runtime = delta.Runtime(
        budget(ordinary, 0.5),
        device="cpu",
        policy="swap",
        host_budget="6MiB",
        disk_budget="64MiB",
        spill_dir=str(tmp_path),
    )
    assert_same_bits(train(runtime), snapshot, "host and disk")
    host, below = runtime.session.tiers()
    assert host["in"][1] > MIB and below["in"][1] > MIB
    assert host["peak_used_bytes"] <= host["cap_bytes"] <= 6 * MIB
    totals = runtime.report().totals
    assert host["in"][1] + below["in"][1] == totals.swapped_in_bytes
    names = [tier.name for tier in runtime.report().tiers]
    assert names[0] == "host memory" and names[1].startswith("disk")
    runtime.close()


def test_both_tiers_share_the_link(tmp_path):
    """What goes to disk passes the link of the virtual accelerator too."""
    runtime = spiller(tmp_path, host_budget="5MiB", link_bytes_per_s=1e8)
    begin = time.monotonic()
    loss, x = swap_out_a_graph(runtime)
    took_s = time.monotonic() - begin
    host, below = runtime.session.tiers()
    out_bytes = host["out"][1] + below["out"][1]
    assert host["out"][1] > 0 and below["out"][1] > 0
    assert took_s >= 0.9 * out_bytes / 1e8
    loss.backward()
    assert torch.equal(x.grad, expected_gradient())
    runtime.close()


def test_sizes_that_fit_no_block(tmp_path):
    """O_DIRECT moves multiples of 4,096 bytes; saved tensors are of any size, also above one bounce buffer."""
    runtime = spiller(tmp_path, min_bytes=0)
    sizes = [1, 3, 1023, 1024, 1025, 4097, (1 << 18) - 1, (1 << 18) + 1, 700_001]
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    with runtime.step():
        losses = [leaf.sin().sin().sum() for leaf in leaves]
        runtime.session.make_room(1 << 40)
        assert disk(runtime)["used_bytes"] > 4 * sum(sizes) - 4096
        sum(losses).backward()
    for leaf in leaves:
        x = leaf.detach().requires_grad_()
        x.sin().sin().sum().backward()
        assert torch.equal(leaf.grad, x.grad)
    runtime.close()


def test_the_environment_can_ask_for_it(tmp_path):
    config = Config.from_environment(
        {
            "DELTA_BUDGET": "100%",
            "DELTA_POLICY": "swap",
            "DELTA_DISK_BUDGET": "32MiB",
            "DELTA_SPILL_DIR": str(tmp_path),
        }
    )
    runtime = delta.Runtime.from_config(config)
    loss, x = swap_out_a_graph(runtime)
    loss.backward()
    assert torch.equal(x.grad, expected_gradient())
    assert disk(runtime)["cap_bytes"] == 32 * MIB
    runtime.close()


# ------------------------------------------------------------------------- the space


def blocks(fd: int) -> int:
    """Bytes of disk that a file takes."""
    return os.fstat(fd).st_blocks * 512


def test_space_is_taken_at_once_and_given_back_at_close(tmp_path):
    runtime = spiller(tmp_path)
    fd = descriptor(runtime)
    assert blocks(fd) >= 64 * MIB
    loss, x = swap_out_a_graph(runtime)
    runtime.close()
    assert blocks(fd) >= 64 * MIB  # backward still needs it
    loss.backward()
    assert torch.equal(x.grad, expected_gradient())
    del loss
    gc.collect()
    assert blocks(fd) == 0
    assert lanes() == 0
    del runtime
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_half_of_what_is_free_without_a_budget(tmp_path):
    runtime = spiller(tmp_path, disk_budget=None)
    free = os.statvfs(tmp_path)
    free_bytes = free.f_bavail * free.f_frsize
    runtime.close()
    assert runtime.tiers.spill.budget_bytes == pytest.approx(free_bytes, rel=0.1)  # as much is left


def test_a_policy_that_does_not_swap_takes_no_space(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    runtime = spiller(tmp_path, policy="recompute")
    assert set(os.listdir("/proc/self/fd")) == before
    assert runtime.session.tiers() == []
    runtime.close()


def test_a_bounce_buffer_counts(tmp_path):
    """On a plain CPU device there is no memory but the device's own."""
    runtime = spiller(tmp_path)
    assert runtime.tiers.spill.direct
    weights = {each.untyped_storage().data_ptr(): each for each in cpu_pool.older_weights()}
    older_bytes = sum(each.untyped_storage().nbytes() for each in weights.values())
    assert runtime.session.levels().uncounted_bytes == 2 * MIB + older_bytes
    runtime.close()


def test_a_session_that_cannot_be_made_leaves_nothing_open(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    policy = dataclasses.replace(get_policy("stress_swap_all"), seed=-1)
    with pytest.raises(TypeError):
        spiller(tmp_path, policy=policy)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_that_looks_like_one_of_ours_stops_nobody(tmp_path):
    boot = spill._boot()
    (tmp_path / f"delta_runtime-{boot}-99999999999999999999-00000000.spill").touch()
    (tmp_path / f"delta_runtime-{boot}-999999999-00000000.spill").touch()
    spiller(tmp_path).close()


def test_no_room_is_said_at_once(tmp_path):
    with pytest.raises(delta.UsageError, match="does not have the room") as caught:
        spiller(tmp_path, disk_budget="800TiB")
    assert "free" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------- faults


def test_a_disk_that_gets_full(ordinary, tmp_path):
    """The file is as large as promised, and then writing to it fails all the same."""
    snapshot, _ = ordinary
    for policy, warned in (("auto", "failed"), ("swap", "budget of .* was passed|failed")):
        runtime = delta.Runtime(
            budget(ordinary, 0.7),
            device="cpu",
            policy=policy,
            spill_dir=str(tmp_path),
            disk_budget="64MiB",
        )
        with (
            replaced(descriptor(runtime), "/dev/full", os.O_RDWR),
            pytest.warns(RuntimeWarning, match=warned) as caught,
        ):
            inside = train(runtime)
        assert_same_bits(inside, snapshot, f"{policy}, full")
        totals = runtime.report().totals
        assert totals.failed_writes > 0 and totals.swap_outs == 0 and totals.lost_pages == 0
        assert totals.rebuilds > 0 or policy == "swap"
        assert any("No space left on device" in str(each.message) for each in caught)
        assert "failed, writing / reading" in str(runtime.report())
        runtime.close()


def test_after_a_failed_write_nothing_is_written(tmp_path):
    runtime = spiller(tmp_path)
    with replaced(descriptor(runtime), "/dev/full", os.O_RDWR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(runtime, steps=1)
        with runtime.step():
            x = torch.randn(1 << 20, requires_grad=True)
            loss = x.sin().sin().sum()
            runtime.session.make_room(1 << 40)
            loss.backward()
    first = runtime.report().totals.failed_writes
    assert first > 0
    train(runtime, steps=1)  # the disk is well again, but nobody trusts it
    assert runtime.report().totals.failed_writes == first and disk(runtime)["used_bytes"] == 0
    runtime.close()


@pytest.mark.parametrize("left_bytes", [0, 3 * MIB + 5000], ids=["nothing left", "half a block"])
def test_what_cannot_be_read_is_recomputed(tmp_path, left_bytes):
    runtime = spiller(tmp_path)
    loss, x = swap_out_a_graph(runtime)
    os.truncate(descriptor(runtime), left_bytes)
    warned = pytest.warns(RuntimeWarning, match="copying from the spill file .* recomputed")
    with warned, runtime.step():
        loss.backward()
        y = torch.ones(1 << 16, requires_grad=True)
        y.sin().sum().backward()  # the report is of steps that save something
    assert torch.equal(x.grad, expected_gradient())
    totals = runtime.report().totals
    assert totals.failed_reads > 0 and totals.lost_pages == 0
    assert (totals.swap_ins > 0) == (left_bytes > 0)
    runtime.close()


@pytest.mark.parametrize("damage", [cut_and_grown, shifted])
@pytest.mark.parametrize("direct", [False, True], ids=["page cache", "O_DIRECT"])
def test_a_file_that_reads_other_bytes_in_a_late_step(tmp_path, monkeypatch, damage, direct):
    """When nothing that comes back is compared any more but a sample."""
    if not direct:
        monkeypatch.setattr(spill, "_use_direct", lambda descriptor: False)
    runtime = spiller(tmp_path)
    for _ in range(4):
        loss, x = swap_out_a_graph(runtime)
        with runtime.step():
            loss.backward()
        assert torch.equal(x.grad, expected_gradient())
    assert runtime.session.counters().failed_reads == 0
    loss, x = swap_out_a_graph(runtime)
    damage(descriptor(runtime))
    loss.backward()
    assert torch.equal(x.grad, expected_gradient())
    counters = runtime.session.counters()
    assert counters.failed_reads > 0 and counters.lost_pages == 0
    with pytest.warns(RuntimeWarning, match="not those that were written.* recomputed"):
        with runtime.step():
            torch.ones(1 << 16, requires_grad=True).sin().sum().backward()
    runtime.close()


def test_what_can_neither_be_read_nor_recomputed_is_an_error(tmp_path):
    """Made by a custom op that nobody has seen repeat: its copy is all there is."""
    library = torch.library.Library("delta_disk_test", "FRAGMENT")
    library.define("shaky(Tensor x) -> Tensor")
    library.impl("shaky", lambda x: x * (1 + random.random()), "CompositeExplicitAutograd")
    runtime = spiller(tmp_path)
    x = torch.randn(1 << 18, requires_grad=True)
    with runtime.step():
        loss = (x * torch.ops.delta_disk_test.shaky(torch.ones(1 << 18))).sum()
        runtime.session.make_room(1 << 40)
    assert disk(runtime)["used_bytes"] >= MIB
    os.truncate(descriptor(runtime), 0)
    with pytest.raises(delta.SwapFailed, match="cannot be read .*No data available.*spill_dir"):
        loss.backward()
    with pytest.raises(delta.SwapFailed):
        loss.backward()  # the same error, not another one
    assert runtime.session.counters().lost_pages == 1
    del loss
    lost = pytest.warns(RuntimeWarning, match="1 saved tensors could not be recomputed")
    with lost, runtime.step():  # and training goes on
        x.grad = None
        x.sin().sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    runtime.close()
    library._destroy()


def test_a_write_that_is_cut_short(ordinary, tmp_path):
    """The limit on file sizes lets a part of a write through, and then none."""
    snapshot, _ = ordinary
    runtime = delta.Runtime(
        budget(ordinary, 0.7),
        device="cpu",
        policy="auto",
        spill_dir=str(tmp_path),
        disk_budget="64MiB",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + MIB // 2, hard))
    try:
        with pytest.warns(RuntimeWarning, match="File too large"):
            inside = train(runtime)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same_bits(inside, snapshot, "short writes")
    totals = runtime.report().totals
    assert totals.failed_writes > 0 and disk(runtime)["out"][1] >= MIB  # the first one went through
    runtime.close()


SMALL_TMPFS = """
    import sys, warnings
    import torch
    import delta_runtime as delta
    from tests.support.bitwise import assert_same_bits
    from tests.support.swapping import budget, ordinary_run, train
    torch.set_num_threads(1)
    folder = sys.argv[1]
    try:
        delta.Runtime("100%", device="cpu", policy="swap", spill_dir=folder, disk_budget="64MiB")
        sys.exit("64 MiB in a tmpfs of 4")
    except delta.UsageError as error:
        assert "does not have the room" in str(error) and "4.00 MiB free" in str(error), error
    run = ordinary_run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime = delta.Runtime(budget(run, 0.6), device="cpu", policy="auto", spill_dir=folder)
    assert any("lies in memory" in str(each.message) for each in caught)
    assert runtime.tiers.spill.budget_bytes == 2 << 20
    assert_same_bits(train(runtime, steps=4), run[0], "a tmpfs of 4 MiB")
    totals = runtime.report().totals
    assert totals.rebuilds > 0 and totals.failed_writes == 0, totals
    print("tier", runtime.session.tiers()[0]["peak_used_bytes"])
"""


def test_a_full_tmpfs(tmp_path):
    inside = f'mount -t tmpfs -o size=4m none "{tmp_path}" && exec "$@"'
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        subprocess.run(
            [*mounted, inside, "sh", "true"], check=True, capture_output=True, timeout=20
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    script = textwrap.dedent(SMALL_TMPFS)
    done = subprocess.run(
        [*mounted, inside, "sh", sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= 2 * MIB


# ------------------------------------------------------------------------- processes that end


TRAINING = """
    import sys
    import delta_runtime as delta
    from tests.support.swapping import train
    runtime = delta.Runtime(int(60e6), device="cpu", policy="swap", spill_dir=sys.argv[1], disk_budget="256MiB")
    print("ready", flush=True)
    while True:
        train(runtime, steps=1)
        print("step", flush=True)
"""


def child(script: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_nothing_stays_behind_a_killed_process(tmp_path):
    chance = random.Random(0)
    for _ in range(3):
        process = child(TRAINING, str(tmp_path))
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        for _ in range(chance.randrange(3)):
            process.stdout.readline()
        time.sleep(chance.random() / 10)
        assert os.listdir(tmp_path) == []
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert os.listdir(tmp_path) == []


KILLED_BEFORE_UNLINK = """
    import errno, os, signal, sys
    from delta_runtime.act import spill
    whole = os.open
    def refusing(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "a file system without nameless files")
        return whole(path, flags, *rest, **named)
    os.open = refusing
    os.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    spill.open_spill_file(sys.argv[1], 1 << 20)
"""


def test_what_was_killed_before_the_name_was_gone_is_removed(tmp_path):
    process = child(KILLED_BEFORE_UNLINK, str(tmp_path))
    _, told = process.communicate()
    assert process.returncode == -signal.SIGKILL, told
    left = os.listdir(tmp_path)
    assert len(left) == 1 and left[0].endswith(".spill")
    mine = tmp_path / left[0].replace(f"-{process.pid}-", f"-{os.getpid()}-")
    mine.touch()  # of a process that lives, and is about to take the name away
    (tmp_path / "delta_runtime-notes.spill").touch()  # not one of ours
    spiller(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == sorted([mine.name, "delta_runtime-notes.spill"])


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    whole = os.open

    def refusing(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return whole(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    runtime = spiller(tmp_path)
    assert os.listdir(tmp_path) == []
    loss, x = swap_out_a_graph(runtime)
    loss.backward()
    assert torch.equal(x.grad, expected_gradient())
    runtime.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_does_not_read_its_parents_file(tmp_path):
    """The parent may use the places for something else at any time; the child recomputes."""
    runtime = spiller(tmp_path)
    loss, x = swap_out_a_graph(runtime)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            loss.backward()
            right = torch.equal(x.grad, expected_gradient())
            failed = runtime.session.counters().failed_reads
            code = 0 if right and failed > 0 else 2
            del loss, runtime
            gc.collect()
        finally:
            os.write(write, bytes([code]))
            os._exit(code)
    os.close(write)
    assert os.read(read, 1) == b"\0"
    os.waitpid(pid, 0)
    os.close(read)
    loss.backward()
    assert torch.equal(x.grad, expected_gradient())
    assert runtime.session.counters().failed_reads == 0
    runtime.close()
