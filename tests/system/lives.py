"""One run, lived several times: ``python lives.py FOLDER`` trains in children that die as ``plan.json`` says.

The folder holds ``config.yaml`` and ``plan.json``; ``straight`` becomes the undisturbed run, ``killed`` the other
one. Each life is a fork of this process, which has torch loaded and has computed nothing, so a life costs no start.
A doom is ``{"point": name, "nth": n}`` (the child kills itself there), or ``{"share": s}`` (it is killed from
outside after that share of a fair part of the run's time). What came of each life goes to ``report.json``.
"""

import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pellucid.checkpoints import files, load, saving
from pellucid.data.loader import Loader
from pellucid.errors import InputError
from pellucid.models.model import Decoder
from pellucid.training import TrainConfig, state, train
from pellucid.training.results import Event, Prepared
from pellucid.training.step import OptimizerSet

importlib.import_module("torch._dynamo")  # which a model without memory needs: once for all lives


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plan = json.loads((folder / "plan.json").read_text())
    config = TrainConfig.from_file(folder / "config.yaml")
    started = time.monotonic()
    assert reap(fork(lambda: live(config.model_copy(update={"save_total_limit": 10**6}), folder / "straight"))) == 0
    whole = time.monotonic() - started
    preparing = float((folder / "straight.prepared").read_text())
    fair = preparing + (whole - preparing) / max(len(plan), 1)
    report = []
    for doom in plan:
        child = fork(lambda doom=doom: live(config, folder / "killed", doom))
        if "share" in doom:
            time.sleep(doom["share"] * fair)
            os.kill(child, signal.SIGKILL)
        ended = reap(child)
        looked = reap(fork(lambda: look(folder / "killed", folder / "straight")))
        report.append({"doom": doom, "ended": ended, "looked": looked})
    last = reap(fork(lambda: live(config, folder / "killed")))
    (folder / "report.json").write_text(json.dumps({"lives": report, "last": last}))


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a child must never go on as its parent
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def reap(child: int) -> int:
    """The exit code; minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def live(config: TrainConfig, run: Path, doom: dict[str, Any] | None = None) -> None:
    """Train until the end, or until doom comes; every batch is noted in ``RUN.order``."""
    started, original = time.monotonic(), Loader.__next__

    def noting(self: Loader) -> Any:
        number, batch = self.batches, original(self)
        line = f"{number} {hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()}\n"
        with open(f"{run}.order", "a") as file:
            file.write(line)
        return batch

    def prepared(event: Event) -> None:
        if isinstance(event, Prepared):
            Path(f"{run}.prepared").write_text(str(time.monotonic() - started))

    Loader.__next__ = noting  # type: ignore[method-assign]
    if doom and "point" in doom:
        POINTS[doom["point"]](Death(doom["nth"]))
    train(config, run, on_event=prepared)


class Death:
    """Comes with the n-th call."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, *, before: Callable[..., Any] | None = None, after: Any = None) -> None:
    """Call ``before`` with the arguments and ``after`` at the end of each call of ``owner.name``."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments)
        result = original(*arguments, **named)
        if after is not None:
            after(*arguments)
        return result

    setattr(owner, name, wrapped)


def forward(die: Death, training: bool) -> None:
    around(Decoder, "forward", before=lambda model, *_: die() if model.training == training else None)


def in_write(die: Death) -> None:
    """Half of a line of the log is written."""
    original = os.write

    def torn(handle: int, data: bytes) -> int:
        if die.left == 1:
            original(handle, data[: len(data) // 2])
        die()
        return original(handle, data)

    os.write = torn  # type: ignore[assignment]


def in_prune(die: Death) -> None:
    """A checkpoint that is being removed has lost some of its files."""

    def partly(path: Path, **_: Any) -> None:
        if path.is_dir():
            (path / "training" / "state.json").unlink(missing_ok=True)
            die()

    around(shutil, "rmtree", before=partly)


POINTS: dict[str, Callable[[Death], None]] = {
    "accumulation": lambda die: forward(die, training=True),
    "validation": lambda die: forward(die, training=False),
    "optimizer": lambda die: around(OptimizerSet, "step", after=lambda *_: die()),
    "log": in_write,
    "state written": lambda die: around(state, "save_state", after=lambda *_: die()),
    "weights written": lambda die: around(saving, "write_weights", after=lambda *_: die()),
    "folder written": lambda die: around(files, "_sync_tree", before=lambda *_: die()),
    "sync": lambda die: around(os, "fsync", before=lambda *_: die()),
    "before rename": lambda die: around(Path, "rename", before=lambda *_: die()),
    "after rename": lambda die: around(Path, "rename", after=lambda *_: die()),
    "before pointer": lambda die: around(Path, "replace", before=lambda *_: die()),
    "after pointer": lambda die: around(Path, "replace", after=lambda *_: die()),
    "prune": in_prune,
}


def look(killed: Path, straight: Path) -> None:
    """What ``load`` accepts must be right: a folder of a step, or of one that was being made, holds that step."""
    checkpoints = killed / "checkpoints"
    for path in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []:
        whole = path.name.startswith("step-")
        try:
            found = load(path, check="digests")
        except InputError:
            assert not whole, f"{path} is torn but has the name of a whole one"
            continue
        name = path.name.lstrip(".").partition(".")[0]
        wanted = load(straight / "checkpoints" / name, check="digests").model.state_dict()
        assert all(torch.equal(value, wanted[key]) for key, value in found.model.state_dict().items()), path
        if whole:
            assert state.read_trainer_state(path / state.FOLDER).step == int(name.removeprefix("step-"))
    if (killed / "last").exists():
        assert (checkpoints / (killed / "last").read_text().strip()).is_dir()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
