"""`elasticd profile`: what the agent refuses and with which remedy, and what the command says when nobody profiles."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.agent.profiles import Profiles
from elastic.cli import main
from elastic.metrics.site import Answer, Ask
from elastic.profile_order import ProfileOrder
from elastic.progress import Progress
from tests.support.job import running, write

SCRIPT = str(Path(__file__).parents[1] / "support" / "trainer_script.py")
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2")


class Worker:
    def __init__(self, rank: int, progress: Progress) -> None:
        self.plan, self.progress = SimpleNamespace(rank=rank), progress
        self.orders: list[ProfileOrder] = []

    def request_profile(self, order: ProfileOrder) -> None:
        self.orders.append(order)


class Loop:
    """The agent's loop, its mailbox and its workers, as far as a profile needs them."""

    def __init__(self, *reports: Progress, log_dir: str | None) -> None:
        self.alive = [Worker(rank, report) for rank, report in enumerate(reports)]
        self.crew: Any = SimpleNamespace(workers=self, round=3, applied_step=10)
        self.profiles = Profiles(crew=self.crew, mailbox=self, log_dir=log_dir)  # type: ignore[arg-type]

    def post(self, request: Any) -> None:
        request.serve()

    def ask(self, query: str) -> Answer:
        return self.profiles.answer(Ask(query=query))


TRAINING = Progress(pid=1, in_loop=1, step=10)


@pytest.mark.parametrize(
    ("reports", "query", "code", "message"),
    [
        ([TRAINING], "steps=0", 400, "--steps=0: 1 to 1000 steps"),
        ([TRAINING], "steps=-1", 400, "--steps=-1: 1 to 1000"),
        ([TRAINING], "steps=1001", 400, "--steps=1001: 1 to 1000"),
        ([TRAINING], "out=/x", 400, "--steps=: 1 to 1000"),
        ([TRAINING], "steps=1", 400, "no --log-dir to write a profile to: name a directory with --out"),
        ([TRAINING], "steps=1&out={folder}/file/x", 400, "Not a directory; name another with --out"),
        ([], "steps=1&out={folder}", 409, "no worker runs on this node now"),
        ([TRAINING, Progress()], "steps=1", 409, "can only profile itself, with torch.profiler"),
        ([TRAINING, Progress()], "steps=1&out={folder}", 409, "can only profile itself, with torch.profiler"),
        ([TRAINING, Progress(pid=1)], "steps=1&out={folder}", 409, "not every worker is in its training loop yet"),
    ],
)
def test_each_refusal_names_its_remedy_and_nothing_is_ordered(
    tmp_path: Path, reports: list[Progress], query: str, code: int, message: str
) -> None:
    (tmp_path / "file").touch()
    loop = Loop(*reports, log_dir=None)
    answer = loop.ask(query.format(folder=tmp_path))
    assert answer.code == code
    assert message in answer.body.decode()
    assert not any(worker.orders for worker in loop.alive)


def test_every_worker_gets_the_same_order_and_one_at_a_time_is_under_way(tmp_path: Path) -> None:
    loop = Loop(TRAINING, TRAINING, log_dir=str(tmp_path / "logs"))
    answer = loop.ask("steps=5")
    told = json.loads(answer.body)
    order = ProfileOrder.from_json(told["order"])
    assert (answer.code, told["round"], told["ranks"]) == (200, 3, [0, 1])
    assert [worker.orders for worker in loop.alive] == [[order], [order]]
    assert (order.steps, order.asked, order.folder) == (5, 2, str(tmp_path / "logs"))
    assert loop.ask("steps=5").code == 409
    for rank in (0, 1):
        order.summary(rank).touch()
    assert loop.ask("steps=5").code == 200, "the first one is written"
    assert loop.ask("steps=5").code == 409
    loop.crew.round = 4
    assert loop.ask("steps=5").code == 200, "the round that was asked is over"
    loop.crew.applied_step += 1000
    assert loop.ask("steps=5").code == 200, "nobody has begun with it"


def test_without_an_agent_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    assert main(["profile"]) == 1
    assert capsys.readouterr().err == "elasticd: no running agent on this host\n"


@pytest.mark.slow
def test_workers_that_do_not_profile_and_a_plain_script_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    with running(tmp_path, *QUICK, SCRIPT, "1000000", "0.003", str(tmp_path / "state")) as job:
        job.wait_step(3)
        assert main(["profile", "--out", str(tmp_path / "out")]) == 1
        assert "their loop must call session.agree()" in capsys.readouterr().err
        assert main(["profile"]) == 1
        assert "name a directory with --out" in capsys.readouterr().err
    write(tmp_path, "plain.py", "from pathlib import Path; import time; Path('here').touch(); time.sleep(600)")
    with running(tmp_path, *QUICK, "plain.py") as job:
        job.wait_status(lambda _: (tmp_path / "here").exists())
        assert main(["profile", "--out", str(tmp_path)]) == 1
        assert "can only profile itself" in capsys.readouterr().err
