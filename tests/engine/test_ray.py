"""The Ray engine: the local engine's bytes, on machines and workers that may be lost at any moment."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from data.corpora import TEXTS, random_ids, write_arrow, write_jsonl
from data.test_pipeline import folder_bytes, write_ids
from data.test_resume import KilledError, stop_at
from neatpack.data import PackOptions, pack
from neatpack.data.job import MakePackJob
from neatpack.engine import LocalEngine, RayEngine, make_engine
from neatpack.errors import MissingDependencyError, PackError, SourceError, StoreError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    """Two Ray machines on this one."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'neatpack[ray]'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # The workers must find the job factories of this module.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, Path(__file__).parents[:2]), before]))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        write_ids(folder / f"{number}.arrow", random_ids(number, 300, 60))
    write_jsonl(folder / "t.jsonl", [{"text": text} for text in TEXTS])
    return folder


def test_the_bytes_are_those_of_the_local_engine(tmp_path, cluster, corpus):
    local = pack(corpus, tmp_path / "local", 64, unit_tokens=4000)
    on_ray = pack(corpus, tmp_path / "ray", 64, unit_tokens=4000, engine="ray", ray_address=cluster.address, workers=None)
    assert local.shards > 6
    assert on_ray.counts == local.counts
    assert folder_bytes(tmp_path / "ray") == folder_bytes(tmp_path / "local")


class DieOnce:
    """A factory of jobs that kill their worker the first time they meet task 1, and leave a note that they did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self):
        def job(task, tick):
            note = self.folder / "died"
            if task == 1 and not note.exists():
                note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            tick(task)
            return task * task

        return job

    def __hash__(self) -> int:
        return hash(self.folder)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DieOnce) and other.folder == self.folder


def test_a_worker_killed_in_the_middle_of_a_task_is_survived(tmp_path, cluster):
    ticks = []
    with RayEngine(DieOnce(tmp_path), address=cluster.address) as engine:
        assert list(engine.run(range(3), ticks.append)) == [0, 1, 4]
    assert sorted(ticks) == [0, 1, 2]
    assert (tmp_path / "died").exists()


def make_dying():
    def die(task, tick):
        os._exit(7)

    return die


def test_a_task_that_kills_every_worker_is_given_up_with_the_way_out(cluster, monkeypatch):
    monkeypatch.setattr("neatpack.engine.ray.RETRIES", 1)
    with (
        RayEngine(make_dying, address=cluster.address) as engine,
        pytest.raises(PackError, match=r"lost with its Ray worker 2 times.*finished work is kept"),
    ):
        list(engine.run([1], lambda amount: None))


def make_failing():
    def fail(task, tick):
        if task == 2:
            time.sleep(0.5)  # later failures come first
            raise SourceError("file 2 is bad")
        if task >= 3:
            raise KeyError("a fault of our own")
        return task, os.getpid()

    return fail


def make_unknown():
    raise AssertionError("never called: workers cannot find it")


def test_a_worker_without_the_code_says_what_is_missing(cluster, monkeypatch):
    monkeypatch.setattr(make_unknown, "__module__", "nowhere_to_be_found")
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", sys.modules[__name__])
    with (
        RayEngine(make_unknown, address=cluster.address) as engine,
        pytest.raises(PackError, match=r"cannot do neatpack's tasks .*nowhere_to_be_found.*Install the same versions"),
    ):
        list(engine.run([1], lambda amount: None))


def test_the_first_failure_in_task_order_is_raised_as_it_was(cluster):
    with RayEngine(make_failing, address=cluster.address) as engine:
        results = engine.run(range(6), lambda amount: None)
        assert next(results)[1] != os.getpid()
        next(results)
        with pytest.raises(SourceError, match="file 2 is bad"):
            next(results)


class FailFirst:
    """A factory of jobs of which the first fails and the others take a while and leave a note."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self):
        def job(task, tick):
            if task == 0:
                raise SourceError("file 0 is bad")
            time.sleep(1)
            (self.folder / f"done{task}").touch()

        return job


def test_after_a_failure_no_task_runs_on_where_the_user_keeps_ray(tmp_path, cluster):
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'neatpack[ray]'")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        with RayEngine(FailFirst(tmp_path), workers=2) as engine, pytest.raises(SourceError, match="file 0 is bad"):
            list(engine.run(range(2), lambda amount: None))
        assert (tmp_path / "done1").exists()
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_a_machine_removed_in_the_middle_of_a_run_is_survived(tmp_path, cluster, corpus):
    pack(corpus, tmp_path / "local", 64, unit_tokens=1000)
    doomed = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    removed = []

    def progress(step: str, done: int, total: int) -> None:
        if step == "pack" and done > total // 4 and not removed:
            removed.append(done / total)
            cluster.remove_node(doomed, allow_graceful=False)

    pack(
        corpus,
        tmp_path / "ray",
        64,
        unit_tokens=1000,
        engine="ray",
        ray_address=cluster.address,
        workers=None,
        progress=progress,
    )
    assert removed
    assert removed[0] < 0.9
    assert folder_bytes(tmp_path / "ray") == folder_bytes(tmp_path / "local")


def test_a_cluster_is_started_where_there_is_none_and_ended_with_the_run(tmp_path, corpus, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'neatpack[ray]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pack(corpus, tmp_path / "local", 64)
    pack(corpus, tmp_path / "ray", 64, engine="ray", workers=1)
    assert folder_bytes(tmp_path / "ray") == folder_bytes(tmp_path / "local")
    assert not ray.is_initialized()


def test_a_run_that_stopped_on_one_engine_goes_on_on_the_other(tmp_path, cluster, corpus):
    pack(corpus, tmp_path / "local", 64, unit_tokens=4000)
    with pytest.raises(KilledError):
        pack(corpus, tmp_path / "out", 64, unit_tokens=4000, progress=stop_at("pack", 3))
    summary = pack(corpus, tmp_path / "out", 64, unit_tokens=4000, engine="ray", ray_address=cluster.address)
    assert summary.resumed
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "local")


def test_what_tasks_carry_does_not_grow_with_the_documents(tmp_path, monkeypatch):
    """The driver sees records of parts and units, never lengths or tokens."""
    sizes: list[int] = []
    run = LocalEngine.run

    def watched(self, tasks, tick):
        for task, result in zip(tasks, run(self, tasks, tick), strict=True):
            sizes.append(len(pickle.dumps((task, result))))
            yield result

    monkeypatch.setattr(LocalEngine, "run", watched)
    largest = []
    for count in (1000, 100_000):
        table = pa.table({"input_ids": pa.array([[number % 9] for number in range(count)], pa.list_(pa.int64()))})
        sizes.clear()
        pack(write_arrow(tmp_path / f"{count}.arrow", table, batch_rows=5000), tmp_path / f"out{count}", 64)
        largest.append(max(sizes))
    assert largest[1] < largest[0] + 100 < 4000


def used_store_bytes() -> int:
    """Bytes in the object stores of all machines of the cluster, as its machines last reported them."""
    import ray

    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources()[name])


def test_the_object_store_stays_empty_whatever_the_size_of_the_corpus(tmp_path, cluster):
    """Measured at every report of progress: a task's arguments and its reply travel with the messages."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'neatpack[ray]'")
    peaks = []
    for count in (1000, 30_000):
        source = write_ids(tmp_path / f"{count}.arrow", random_ids(count, count, 40))
        used: list[int] = []
        pack(
            source,
            tmp_path / f"out{count}",
            64,
            unit_tokens=20_000,
            engine="ray",
            ray_address=cluster.address,
            progress=lambda step, done, total, used=used: used.append(used_store_bytes()),
        )
        peaks.append(max(used))
    assert peaks == [0, 0]
    with RayEngine(make_dying, address=cluster.address):
        kept = ray.put(b"x" * 1_000_000)  # the measure sees what lies in the store
        deadline = time.monotonic() + 30
        while used_store_bytes() < 1_000_000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        del kept


def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch, corpus):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"--engine ray needs the package 'ray'.*neatpack\[ray\]"):
        pack(corpus, tmp_path / "out", 64, engine="ray")


@pytest.fixture
def asked(monkeypatch):
    """Addresses that Ray is asked to connect to, by a Ray that does nothing else."""
    addresses: list[str] = []
    ray = SimpleNamespace(
        is_initialized=lambda: False, init=lambda address, **_: addresses.append(address), shutdown=lambda: None
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


@pytest.fixture
def closed_port():
    """A port of this machine at which nobody listens, though it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_that_nobody_answers_at_is_refused_before_ray_is_asked(tmp_path, corpus, asked, closed_port, scheme):
    address = f"{scheme}127.0.0.1:{closed_port}"
    with pytest.raises(PackError, match=rf"no Ray cluster answers at {address} .*Check --ray-address or RAY_ADDRESS"):
        pack(corpus, tmp_path / "out", 64, engine="ray", ray_address=address)
    assert asked == []


def test_an_address_of_the_environment_is_tried_too(asked, closed_port, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    with pytest.raises(PackError, match="no Ray cluster answers"), RayEngine(make_failing):
        pass
    assert asked == []


def test_a_silent_host_is_waited_for_seconds_and_no_longer(asked, monkeypatch):
    def never(place, timeout):
        assert place == ("nohost", 1234)
        raise TimeoutError(f"timed out after {timeout}")

    monkeypatch.setattr(socket, "create_connection", never)
    with pytest.raises(PackError, match=r"answers at nohost:1234 \(timed out after 5\.0; waited at most 5 seconds\)"):
        RayEngine(make_failing, address="nohost:1234").__enter__()
    assert asked == []


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        ("head", "head, names no port"),
        ("ray://head", "names no port"),
        (":6379", "names no host"),
        ("head:x", "cannot be read"),
    ],
)
def test_an_address_without_host_and_port_is_refused(asked, address, wrong):
    with pytest.raises(PackError, match=rf"{wrong}.*expected host:port or ray://host:port"):
        RayEngine(make_failing, address=address).__enter__()
    assert asked == []


def test_a_cluster_that_listens_and_addresses_that_only_ray_knows_are_left_to_ray(asked):
    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = f"ray://127.0.0.1:{server.getsockname()[1]}"
        for address in (listening, "auto", None, "other://cluster"):
            with RayEngine(make_failing, address=address):
                pass
    assert asked == [listening, "auto", "local", "other://cluster"]


def test_an_engine_that_is_none_is_refused(tmp_path, corpus):
    with pytest.raises(PackError, match="unknown engine 'dask': choose one of local, ray"):
        pack(corpus, tmp_path / "out", 64, engine="dask")
    with pytest.raises(PackError, match=r"address of a Ray cluster \(auto\) was given for engine='local'"):
        make_engine("local", make_failing, workers=1, ray_address="auto")


def test_a_machine_that_does_not_see_the_folder_says_so(tmp_path):
    with pytest.raises(StoreError, match=r"elsewhere: not there on the machine .*under the same paths"):
        MakePackJob(PackOptions(seq_len=8), tmp_path, tmp_path / "elsewhere")()
