"""Audit every causal, masked and encoder–decoder class of the installed transformers; write docs/verdicts.md.

    OMP_NUM_THREADS=1 nice -n 19 python docs/verdicts.py [--only llama,bert] [--checks future,loss] [--jobs 1]
        [--seconds 120] [--redo] [--write]

Each class is built from a tiny config and audited in a process of its own, with a time and a memory limit.
What was found is kept in docs/verdicts.jsonl: run again, only gaps are filled (checks that are new among them).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE, PAGE, REPRODUCERS = HERE / "verdicts.jsonl", HERE / "verdicts.md", HERE / "reproducers"
LENGTH, SECONDS, MEMORY = 12, 120, 8 << 30
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


def classes() -> list[tuple[str, str, str]]:
    """(kind, model type, class) of everything in the auto maps."""
    from transformers.models.auto import modeling_auto

    return [(kind, model_type, name) for kind, mapping in KINDS.items()
            for model_type, name in getattr(modeling_auto, mapping).items()]  # fmt: skip


def built(kind: str, model_type: str, class_name: str) -> Any:
    """The class over a tiny config, with weights that matter."""
    import transformers

    from pellucid.audits.probes.hf_load import tiny_model

    del model_type
    return tiny_model(getattr(transformers, class_name), kind)


def audited(kind: str, model_type: str, class_name: str, checks: list[str]) -> dict[str, Any]:
    """One row: what was found, or why nothing could be."""
    row: dict[str, Any] = {"kind": kind, "type": model_type, "class": class_name}
    start = time.perf_counter()
    try:
        from pellucid.audits.probes.hf_detect import probe_for_hf
        from pellucid.audits.run import audit

        probe = probe_for_hf(built(kind, model_type, class_name))
        if probe is None:
            raise TypeError("its forward takes no input_ids, so it is not asked by text alone")
        report = audit(probe.module, probe, checks, length=LENGTH)
    except BaseException as error:  # noqa: BLE001 (the row says what it was)
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())[:200]
        row["failed"] = f"{type(error).__name__}: {said} ({Path(place.filename).name}:{place.lineno})"
    else:
        row["verdicts"] = report.verdicts
        row["said"] = [
            {"check": f.check, "status": f.status, "case": f.case, "message": f.message[:300],
             "where": str(f.where or ""), "decided": f.decided}
            for f in report.findings if f.status not in ("pass", "not_applicable")
        ]  # fmt: skip
        row["rules"] = [rule.describe() for rule in probe.rules]
        row["declared"], row["can"] = probe.rules_declared, sorted(probe.capabilities)
        row["sides"] = list(probe.sides)
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def in_a_process(kind: str, model_type: str, class_name: str, checks: list[str], seconds: int) -> dict[str, Any]:
    """``audited`` in a child that may crash, hang or eat memory."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(seconds)
        with os.fdopen(writer, "w") as out, open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            json.dump(audited(kind, model_type, class_name, checks), out)
        os._exit(0)
    os.close(writer)
    killer = time.monotonic() + seconds + 20
    with os.fdopen(reader) as answer:
        text = _read_until(answer, killer, child)
    _, status = os.waitpid(child, 0)
    try:
        row: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError:
        why = f"the process ended with status {status}"
        row = {"kind": kind, "type": model_type, "class": class_name, "failed": why, "seconds": seconds}
    return row


def _read_until(answer: Any, deadline: float, child: int) -> str:
    import select

    while not select.select([answer], [], [], 1.0)[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return ""
    text: str = answer.read()
    return text


def _too_long(*_: object) -> None:
    raise TimeoutError("not done in the time given")


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


def kept() -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of the cache that belong to the installed versions; the last one of a class counts."""
    rows = {}
    if CACHE.exists():
        for line in CACHE.read_text().splitlines():
            row = json.loads(line)
            if row.get("versions") == versions():
                rows[row["kind"], row["type"]] = row
    return rows


def filled(only: set[str], wanted: set[str], redo: bool, seconds: int, share: int, shares: int) -> None:
    """Audit what is missing from the cache, class by class."""
    from pellucid.audits.checks import CHECKS

    rows, asked = kept(), [check for check in CHECKS if not wanted or check in wanted]
    for number, (kind, model_type, name) in enumerate(classes()):
        if number % shares != share or (only and model_type not in only and kind not in only):
            continue
        old = rows.get((kind, model_type), {})
        checks = [check for check in asked if redo or check not in old.get("verdicts", {})]
        if not checks or ("failed" in old and not redo and not only):
            continue
        row = in_a_process(kind, model_type, name, checks, seconds)
        if "verdicts" in row and "verdicts" in old:
            row["verdicts"] = old["verdicts"] | row["verdicts"]
            row["said"] = [said for said in old["said"] if said["check"] not in checks] + row["said"]
        row["versions"], row["date"] = versions(), datetime.date.today().isoformat()
        with CACHE.open("a") as out:  # one write: several may append
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
        worst = [f"{c}: {s}" for c, s in row.get("verdicts", {}).items() if s in ("leak", "error")]
        print(
            f"{row['seconds']:6.1f} s  {kind} {name}: {row.get('failed') or ', '.join(worst) or 'no leak'}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="model types or kinds, with commas between them")
    parser.add_argument("--checks", default="", help="names of checks; all, where left out")
    parser.add_argument("--jobs", type=int, default=1, help="how many classes at a time")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="the most that one class may take")
    parser.add_argument("--redo", action="store_true", help="audit again what is in the cache")
    parser.add_argument("--write", action="store_true", help="only write the page from the cache")
    chosen = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(HERE))
    import torch
    from transformers import BertModel, LlamaForCausalLM, T5Model  # noqa: F401 (once, before children are forked)

    import pellucid.audits.probes.hf_detect
    import pellucid.audits.run  # noqa: F401

    torch.set_num_threads(1)
    if not chosen.write:
        children = []
        for share in range(chosen.jobs):
            child = os.fork()
            if child == 0:
                only, wanted = (set(filter(None, names.split(","))) for names in (chosen.only, chosen.checks))
                filled(only, wanted, chosen.redo, chosen.seconds, share, chosen.jobs)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        CACHE.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept().values()))
    from verdicts_page import page

    PAGE.write_text(page(kept(), classes(), REPRODUCERS, versions()))
    counts = Counter("built" if "verdicts" in row else "not built" for row in kept().values())
    print(f"{PAGE.name}: {dict(counts)}")


if __name__ == "__main__":
    main()
